"""Every experiment file in the repository composes, and Lightning's parser takes it, class by class, type by type."""

import copy
from collections.abc import Iterator

import pytest
import yaml

from experiments.commands.size import module_of, sized
from experiments.registry import listing as registry
from experiments.registry.errors import ExperimentError
from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.registry.shapes import GPU_SPECS
from experiments.registry.sizing import peak
from experiments.stages.graph import Graph, closure, require_files
from experiments.stages.parser import cli
from experiments.stages.validate import check, check_classes

PROJECT = Project()
NAMES = registry.names(PROJECT)
NAMING = ("experiment", "experiment_name", "run_name", "save_dir", "tokenizer")
PAPER = [n for n in NAMES if "qwen" in n or "llama" in n]
# One of every kind; the others are `slow`.
REPRESENTATIVE = ["world_tiny", "dgpo_tiny", "arpo_tiny", "sdar_tiny", "sod_qwen3_0.6b", "quick_sod_qwen3_1.7b"]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_composes_and_validates(name, shipped):
    stage = shipped.stage(name)
    check(stage, PROJECT.root)
    yaml.safe_dump(stage.config)  # what config.yaml will hold


def nesting(value: object, parent: str = "", name: str = "") -> Iterator[tuple[str, str, str]]:
    """Every object of a configuration: the class and the option that hold it, and its own class. The parser adds
    nothing to the checks of names and types for a configuration whose objects it has all seen in these places."""
    if isinstance(value, dict):
        parent = value.get("class_path", parent)
        yield parent, name, value.get("class_path", "")
        for key, inner in (value.get("init_args", value) or {}).items():
            if key not in NAMING:
                yield from nesting(inner, parent, key)
    elif isinstance(value, list):
        for inner in value:
            yield from nesting(inner, parent, name)


@pytest.mark.slow
def test_every_experiment_validates(shipped):
    """The parser takes a second for each, so it is given every object once."""
    parsed: set[tuple[str, str, str]] = set()
    for name in NAMES:
        if name == "verifiers_words" and not (ROOT / ".venv-verifiers").exists():  # make environments
            continue
        stage = shipped.stage(name)
        about = stage.config["experiment"]
        assert all(about[key] for key in ("summary", "algorithm", "models", "data", "hardware")), name
        mentioned = [other for key in ("compare", "ablations", "ablations_once") for other in about.get(key) or []]
        assert set(mentioned) <= set(NAMES), name
        found = {place for place in nesting(stage.config) if place[2]}
        if found <= parsed:
            require_files([stage], PROJECT.root)
            check_classes(stage.config, name)
        else:
            check(stage, PROJECT.root)
        parsed |= found


@pytest.mark.slow
def test_experiments_of_the_papers_fit_the_gpus_that_they_name_and_list_what_they_need(shipped):
    for name in PAPER:
        stage = shipped.stage(name)
        needs = [need for each in closure([stage]) for need in each.needs]
        assert needs and all(need.how and need.path for need in needs), name
        if stage.kind == "fit":
            gpus, chip = (1, "4090") if name.startswith("quick_") else (8, "a100")
            assert stage.config["experiment"]["hardware"].startswith(f"{gpus} GPU")
            if not name.endswith("_as_released"):  # which is of the size of the plain one
                training = sized(stage, module_of(stage), gpus, PROJECT.root).training
                assert peak(training, GPU_SPECS[chip]) <= GPU_SPECS[chip].memory, name


def test_a_test_asks_for_its_teacher_only_where_it_is_wanted_or_teaches(shipped):
    """The turn scores of a test read 4 B parameters more; a baseline starts without them."""

    def teacher(stage):
        callbacks = [c["class_path"].rpartition(".")[2] for c in stage.config["trainer"]["callbacks"]]
        return "SOD-GRPO_teacher-4B" in str([need.path for need in stage.needs]), "TurnDivergence" in callbacks

    assert teacher(shipped.stage("grpo_qwen3_0.6b")) == teacher(shipped.stage("untrained_qwen3_0.6b")) == (False, False)
    assert teacher(shipped.stage("sod_qwen3_0.6b")) == (True, True)
    asked = Graph(PROJECT, "grpo_qwen3_0.6b", parse(["--paths.turn_scores", "teacher"])).target()
    assert teacher(asked) == (True, True)


@pytest.mark.parametrize(
    "name",
    [
        "sod_qwen3_0.6b",
        "my_sod",
    ],
)
def test_fast_paths_are_on_and_papers_keep_their_gradient(name, shipped):
    model = shipped.stage(name).config["model"]["init_args"]
    assert model["packing"] and model.get("importance_cap") == (2.0 if name == "my_sod" else None)
    assert model.get("liger", False) == (name in PAPER), "my_* run anywhere, Liger on CUDA alone"


def test_dgpo_tiny_is_the_chain_the_readme_tells(shipped):
    target = shipped.stage("dgpo_tiny")
    chain = [s.name for s in closure([target])]
    for earlier, later in [
        ("world_tiny", "index_tiny"),
        ("teacher_tiny", "demonstrations_tiny"),
        ("demonstrations_tiny", "kd_tiny"),
        ("kd_tiny", "dgpo_tiny"),
    ]:
        assert chain.index(earlier) < chain.index(later)
    assert not any(stage.needs for stage in closure([target])), "the embedded default needs no download"


@pytest.mark.parametrize(
    ("name", "changed", "data_changed"),
    [
        ("dgpo_tiny_uniform_kl", {"selective"}, set()),
        # A student that cannot end a turn writes five times as many tokens; its budget is that of the others in tokens.
        ("dgpo_tiny_no_cold_start", {"policy"}, {"iterations"}),
        ("dgpo_tiny_kl_in_loss", {"kl_in", "kl_estimator"}, set()),
    ],
)
def test_an_ablation_changes_one_thing(name, changed, data_changed, shipped):
    main, ablation = (shipped.stage(n).config for n in ("dgpo_tiny", name))
    ours, theirs = main["model"]["init_args"], ablation["model"]["init_args"]
    assert {k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k)} == changed
    data, other = main["data"]["init_args"], ablation["data"]["init_args"]
    differing = {k for k in data if data[k] != other[k]}
    assert differing - {"rollouts"} == data_changed  # the rollouts' engine starts from the policy


@pytest.mark.parametrize(
    ("penalised", "free"),
    [("kd_ppo_kl_tiny", "kd_ppo_tiny"), ("kd_ppo_qwen2.5_0.5b", "kd_ppo_no_kl_qwen2.5_0.5b")],
)
def test_ppo_after_kd_is_there_with_and_without_its_kl(penalised, free, shipped):
    """At both scales: the paper does not say which of the two its ablation is."""
    with_kl, without = (shipped.stage(name).config["model"] for name in (penalised, free))
    assert with_kl["init_args"].get("kl_coef") in (None, 0.001), "the learner's default, or the same named"
    assert with_kl["init_args"]["reference"] == with_kl["init_args"]["policy"]
    assert without == with_kl | {"init_args": with_kl["init_args"] | {"reference": None}}


def test_the_paper_run_has_the_values_of_the_specification(shipped):
    config = shipped.stage("dgpo_qwen2.5_0.5b").config
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    expected = {
        "lr": 1e-6, "critic_lr": 1e-5, "warmup_steps": 285, "critic_warmup_steps": 15, "weight_decay": 0.01,
        "max_grad_norm": 1.0, "clip_low": 0.2, "clip_high": 0.2, "value_clip": 0.5, "entropy_coef": 0.001, "gamma": 1.0,
        "lam": 1.0, "kl_coef": 0.001, "kl_in": "reward", "selective": True, "kl_estimator": "k1", "temperature": 1.0,
        "num_mini_batches": 2, "epochs": 1,
    }  # fmt: skip
    assert {k: model[k] for k in expected} == expected
    assert (data["prompts_per_iteration"], data["group_size"], data["iterations"]) == (512, 1, 1000)
    rollouts = data["rollouts"]["init_args"]
    assert (rollouts["max_turns"], rollouts["max_turn_tokens"], rollouts["max_observation_tokens"]) == (4, 500, 500)
    assert rollouts["max_response_tokens"] == 4096
    assert rollouts["protocol"]["init_args"]["template"] == "dataset", "Search-R1's wording, as the teacher knows it"
    assert rollouts["environment"]["init_args"]["tools"]["search"]["init_args"]["topk"] == 3


ARPO_RUNS = {  # docs/algorithms/arpo.md: n, N, call limit, response tokens, prompts per iteration
    "qwen2.5_3b": (16, 8, 3, 4096, 128),
    "qwen2.5_7b": (16, 8, 3, 4096, 128),
    "llama3.1_8b": (16, 8, 3, 4096, 128),
    "qwen3_8b": (16, 8, 6, 10000, 128),
    "qwen3_14b": (12, 6, 6, 6192, 64),
}


@pytest.mark.parametrize("model", ARPO_RUNS)
@pytest.mark.parametrize("algorithm", ["grpo", "arpo", "aepo"])
def test_arpos_runs_have_the_values_of_the_specification(algorithm, model, shipped):
    samples, roots, calls, tokens, prompts = ARPO_RUNS[model]
    config = shipped.stage(f"{algorithm}_{model}").config
    learner, data = config["model"]["init_args"], config["data"]["init_args"]
    expected = {
        "lr": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0,
        "kl_coef": 0.0, "entropy_coef": 0.0, "temperature": 1.0, "num_mini_batches": 8, "epochs": 1, "warmup_steps": 0,
        "aggregation": "sequence_mean",
    }  # fmt: skip
    assert {k: learner[k] for k in expected} == expected
    assert config["model"]["class_path"].rpartition(".")[2].lower() == algorithm
    assert learner["policy"].split("/")[-3] == f"sft_arpo_{model}"
    assert (data["group_size"], data["prompts_per_iteration"]) == (samples, prompts)
    rollouts = data["rollouts"]["init_args"]
    assert (rollouts["max_turns"], rollouts["max_response_tokens"]) == (calls, tokens)
    sampler = rollouts.get("sampler")
    if algorithm == "grpo":
        assert sampler is None
        return
    chosen = {"initial_rollouts": roots, "beam_size": 2, "branch_probability": 0.5, "entropy_weight": 0.2}
    assert {k: sampler["init_args"][k] for k in chosen} == chosen


def test_arpo_and_aepo_as_released_have_the_released_switches_on(shipped):
    def switches(name):
        config = shipped.stage(name).config
        learner, data = config["model"]["init_args"], config["data"]["init_args"]
        rollouts = data["rollouts"]["init_args"]
        sampler = rollouts["sampler"]["init_args"]
        return (
            sampler["variant"], sampler["pre_monitoring"], learner["entropy_weight"], learner["aggregation"],
            rollouts["reward"]["init_args"]["variant"], rollouts["limit_eos"], rollouts["max_observation_tokens"],
            data["val_sampling"], data["eval_sampling"].get("repetition_penalty", 1.0), rollouts["test_limits"],
        )  # fmt: skip

    mended = ("fixed", True, 0.2, "sequence_mean", "fixed", False, 2048, None, 1.0, None)
    limits = {"max_turns": 30, "max_turn_tokens": 4096, "max_response_tokens": 30000}
    released = ("lock_step", False, 0.0, "token_mean", "as_released", True, 10000, {"temperature": 0.0}, 1.1, limits)
    assert (switches("aepo_qwen3_8b"), switches("aepo_qwen3_8b_as_released")) == (mended, released)
    traces = [shipped.stage(f"traces_arpo_qwen3_8b{end}").config["task"]["init_args"] for end in ("", "_as_released")]
    assert [(t["instruction"], t["mask_results"]) for t in traces] == [("system", True), ("user", False)]


@pytest.mark.parametrize(
    ("name", "hub", "number", "sets"),
    [
        ("released_arpo_qwen2.5_3b", "Qwen2.5-3B-ARPO", "52.8", 10),
        ("released_arpo_qwen3_8b", "Qwen3-8B-ARPO-DeepSearch", "GAIA 38.8", 5),
        ("released_aepo_qwen3_14b", "Qwen3-14B-AEPO-DeepSearch", "GAIA 47.6", 5),
    ],
)
def test_arpos_released_checkpoints_are_tested_as_released(name, hub, number, sets, shipped):
    config = shipped.stage(name).config
    about, data = config["experiment"], config["data"]["init_args"]
    assert (about["kind"], about["needs"]["base"]["hub"]) == ("test", f"dongguanting/{hub}")
    assert number in about["reproduces"] and len(data["test_files"]) == sets
    tested = {file.partition(":")[0] for file in data["test_files"]}
    assert {column.partition("/")[2] for column in about["columns"]} - {""} == tested, "each set in the paper's measure"
    sampling = {k: data["eval_sampling"][k] for k in ("temperature", "top_p", "repetition_penalty")}
    assert sampling == {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    rollouts = data["rollouts"]["init_args"]
    assert (rollouts["test_limits"]["max_turn_tokens"], rollouts["engine"]["init_args"]["max_length"]) == (4096, 32768)
    limits = rollouts["environment"]["init_args"]["tool_limits"]
    assert (limits["python"]["max_calls"], limits["search"]["max_calls"]) == (5, 10)
    [evaluation] = [c["init_args"] for c in config["trainer"]["callbacks"] if c["class_path"].endswith(".Evaluation")]
    assert evaluation["answers"]["class_path"].endswith("ArpoReleasedAnswers") and evaluation["judge"] is not None


@pytest.mark.parametrize(
    ("name", "hub", "number"),
    [
        ("released_dgpo_qwen2.5_0.5b", "DGPO-qwen2.5-0.5b", ".329"),
        ("released_kd_qwen2.5_0.5b", "Qwen2.5-0.5B-Instruct-kd", ".298"),
    ],
)
def test_dgpos_released_checkpoints_are_tested_as_released(name, hub, number, shipped):
    config = shipped.stage(name).config
    about, data = config["experiment"], config["data"]["init_args"]
    assert (about["kind"], about["needs"]["student"]["hub"]) == ("test", f"omron-sinicx/{hub}")
    assert number in about["reproduces"] and about["columns"][0] == "average_of_sets/1"
    rollouts = data["rollouts"]["init_args"]
    models = (config["model"]["init_args"]["policy"], rollouts["engine"]["init_args"]["model"])
    assert {*models, rollouts["protocol"]["init_args"]["tokenizer"]} == {f"models/{hub}"}
    [evaluation] = [c["init_args"] for c in config["trainer"]["callbacks"] if c["class_path"].endswith(".Evaluation")]
    scorer = {"class_path": "rollout.rewards.qa.SearchR1ReleasedAnswers", "init_args": {"tokenizer": f"models/{hub}"}}
    assert evaluation["answers"] == scorer
    assert data["eval_sampling"]["temperature"] == 1.0 and rollouts["protocol"]["init_args"]["opening_tag"] == "first"
    assert (rollouts["max_turns"], rollouts["max_turn_tokens"], rollouts["max_observation_tokens"]) == (4, 500, 500)


def test_the_tiny_runs_of_arpo_differ_in_their_sampler_only(shipped):
    def parts(name):
        config = shipped.stage(name).config
        data = dict(config["data"]["init_args"])
        rollouts = dict(data.pop("rollouts")["init_args"])
        sampler = rollouts.pop("sampler", None)
        return config["model"]["init_args"], data, rollouts, sampler

    learner, data, rollouts, sampler = parts("arpo_tiny")
    for name, change in [
        ("grpo_tiny", None),
        ("arpo_tiny_random", {"entropy_weight": 0.0}),
        ("arpo_tiny_lock_step", {"variant": "lock_step"}),
    ]:
        others = parts(name)
        assert others[:3] == (learner, data, rollouts), name
        expected = None if change is None else {**sampler, "init_args": {**sampler["init_args"], **change}}
        assert others[3] == expected, name


def test_paths_given_on_the_command_line_reach_every_stage():
    stages = closure([Graph(PROJECT, "dgpo_qwen2.5_0.5b", parse(["--paths.teacher", "/my/teacher"])).target()])
    for stage in stages:
        assert "/my/teacher" in str(stage.config), stage.name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--data.iterations=5"], "val_check_interval is 40, but the run has only 5 iterations"),
        (["--trainer.gradient_clip_val=1"], "gradient_clip_val is 1.*model.max_grad_norm"),
        (["--data.train_sampling.temperature=0.5"], "sampled at temperature 0.5 .* computed at 1.0"),
        (
            ["--data.rollouts.max_length=4096"],
            "rollouts.max_length is 4096, but .*max_length is 1024; take 1024",
        ),
    ],
)
def test_a_wrong_override_is_one_line_with_the_nearest_name(overrides, message):
    stage = Graph(PROJECT, "dgpo_tiny", parse(overrides)).target()
    with pytest.raises(ExperimentError, match=message) as caught:
        check(stage, ROOT)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600, str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [
                "--model.skills.bank=household_tiny",
                "--model.skills.retriever=rollout.skills.bandit.UCB",
                "--model.skills.retriever.c=-1",
            ],
            "c' is -1; expected a number of at least 0",
        ),
    ],
)
def test_skills_that_cannot_be_used_are_refused_before_the_first_stage_of_the_chain(overrides, message):
    stage = Graph(PROJECT, "sdar_tiny", parse(overrides)).target()
    with pytest.raises(ExperimentError, match=f"experiment 'sdar_tiny': .*{message}"):
        check(stage, ROOT)


@pytest.mark.parametrize(
    ("section", "option", "text", "message"),
    [
        (
            "trainer",
            "strategy",
            "1e-3",
            "'trainer.strategy': Expected a str; expected class_path and init_args",
        ),
        (
            "data",
            "iterations",
            "0x10",
            "'data.iterations': found '0x10'; expected a valid integer, unable to parse string",
        ),
    ],
)
def test_a_text_that_the_parser_takes_for_a_number_is_one_sentence(section, option, text, message, shipped):
    """What is left to the parser: a file's ``1e-3`` is text by YAML 1.1, and a number for jsonargparse."""
    config = copy.deepcopy(shipped.stage("dgpo_tiny").config)
    config[section].get("init_args", config[section])[option] = text
    check_classes(config, "x")
    with pytest.raises(ExperimentError, match=f"^x: {message}") as caught:
        cli(config, [], "x", instantiate=False)
    assert "\n" not in str(caught.value)
