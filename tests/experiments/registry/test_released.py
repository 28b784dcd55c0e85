"""The papers' experiments with the switches of their released code."""

import pytest

from experiments.registry.compose import resolve
from experiments.registry.files import differences
from experiments.registry.listing import load, names
from experiments.registry.project import Project

SUFFIX = "_as_released"
SHIPPED = [name for name in names(Project()) if name.endswith(SUFFIX)]


def plain_of(config, name, stages):
    """Resolve ``config`` under the plain ``name`` and with plain stages; ``stages`` gets those that it stands on."""
    config["experiment"]["name"] = name

    def plain(stage):
        stages.append(stage)
        return stage.removesuffix(SUFFIX)

    return resolve(config, plain)


def released_differences(name):
    """What the switches change: (key, value, released value)."""
    return differences(*(plain_of(load(each, Project()), name, []) for each in (name, name + SUFFIX)))


@pytest.mark.slow
def test_every_experiment_as_released_differs_and_has_the_published_number():
    """It stands on stages as released; a plain one with the number would be held against what it does not reproduce."""
    assert len(SHIPPED) == 122
    for name in SHIPPED:
        plain, released = load(name.removesuffix(SUFFIX), Project()), load(name, Project())
        about, twin = plain["experiment"], released["experiment"]
        assert not about.get("reproduces") and twin["reproduces"], name
        assert twin["summary"] == f"{about['summary']}, as released" and twin["family"] == about["family"], name
        stages = [*(twin.get("compare") or ()), *(twin.get("ablations") or ())]
        both = (plain_of(plain, "plain", []), plain_of(released, "plain", stages))
        assert not [stage for stage in stages if stage + SUFFIX in SHIPPED], name
        assert differences(*both), name


def asked_and_judged(name):
    """How the questions of a test are asked and judged."""
    data = resolve(load(name, Project()), lambda stage: stage)["data"]["init_args"]
    rollouts = data["rollouts"]["init_args"]
    asked = ("eval_sampling", "attempts", "test_files", "prompts", "lcb_examples", "max_test", "max_eval_prompt_tokens")
    played = ("protocol", "environment", "reward", "max_turns", "max_response_tokens", "test_limits")
    return {key: data.get(key) for key in asked} | {key: rollouts.get(key) for key in played}


@pytest.mark.parametrize(
    "name",
    [
        "dgpo_qwen2.5_0.5b", "dgpo_qwen2.5_0.5b_as_released", "sod_qwen3_0.6b_as_released", "aepo_qwen2.5_7b",
        "arpo_qwen2.5_7b_as_released", "sdar_qwen2.5_3b_search_as_released",
    ],
)  # fmt: skip
def test_the_rows_of_a_table_are_tested_alike(name):
    about = load(name, Project())["experiment"]
    for other in (*about["compare"], *about.get("ablations", ())):
        assert asked_and_judged(other) == asked_and_judged(name), other


def test_no_reward_for_calls_in_a_group_of_wrong_answers():
    """0.1 a tool round would be all that differs between them, and dividing by the group's spread makes it large."""
    found = {key: both for key, *both in released_differences("sod_qwen3_0.6b")}
    assert found["data.rollouts.reward.tool_shaping"] == ["none", "as_released"]


def test_sdars_switches_are_those_of_its_skills_and_of_the_search_script():
    alfworld, search, plain = (
        {key: [here, there] for key, here, there in released_differences(name)}
        for name in ("sdar_qwen2.5_7b_alfworld", "sdar_qwen2.5_7b_search", "grpo_qwen2.5_7b_search")
    )
    assert alfworld == {
        "model.skills.place": ["user_turn", "before_template"],
        "model.skills.header": ["What is known to work here:", "[Privileged Skill Information]"],
        "model.skills.every_turn": [False, True],
    }
    assert plain == {"model.kl_coef": [0.01, 0.001]}
    assert search == alfworld | plain | {
        "model.skills.retriever.compare": [True, False],
        "model.skills.retriever.unknown_sources": ["refuse", "general"],
    }
    about, twin = (load(f"sdar_qwen2.5_7b_search{end}", Project())["experiment"] for end in ("", SUFFIX))
    assert "reproduces" not in about and twin["reproduces"].startswith("SDAR row")
    assert load("sdar_random_qwen2.5_7b_alfworld", Project())["experiment"]["reproduces"] == "table 2, 83.1"
    full = load("sdar_full_qwen2.5_7b_alfworld" + SUFFIX, Project())["experiment"]
    assert full["reproduces"] == "table 2, 83.2"
    gigpo = load("gigpo_qwen2.5_7b_search", Project())  # verl-agent's script
    settings = {"similarity": 0.9, "entropy_coef": 0.0, "kl_coef": "${values.kl_coef}"}
    assert {name: gigpo["model"]["init_args"][name] for name in settings} == settings
    named = {"tasks": 256, "group_size": 5, "num_mini_batches": 5, "kl_coef": 0.001, "iterations": 169_615 // 256}
    assert {name: gigpo["values"][name] for name in named} == named and gigpo["values"]["warmup_steps"] == 662 // 10
    for name, iterations in (("gigpo_qwen2.5_7b_search", 662), ("sdar_qwen2.5_7b_search", 150)):
        assert resolve(load(name, Project()), lambda name: name)["data"]["init_args"]["iterations"] == iterations


def test_dgpos_invalid_turns_are_answered_in_the_released_words():
    """A reworded note is another prompt for checkpoints that have learnt with this one."""
    for name in ("dgpo_qwen2.5_0.5b", "dgpo_qwen2.5_0.5b_as_released", "demonstrations_qwen2.5_3b"):
        protocol = load(name, Project())["values"]["rollouts"]["init_args"]["protocol"]["init_args"]
        assert protocol["correction"] == (
            "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
            "</search>. If I want to give the final answer, I should put the answer between <answer> and </answer>. "
            "Let me try again.\n"
        )


RELEASED_SOD = {
    "protocol.newline": False, "protocol.call_format": "verl", "reward.math": "strict_box",
    "reward.tool_shaping": "as_released", "reward.code_as_released": True,
    "reward.max_timeouts": None,
    "environment.tools.code_interpreter.print_last_line": True, "environment.tools.code_interpreter.cut_at": 256,
    "environment.tools.code_interpreter.hide_failures": True,
}  # fmt: skip


@pytest.mark.parametrize("name", ["sod_qwen3_0.6b", "untrained_qwen3_1.7b", "sod_teacher_qwen3_4b"])
def test_sods_twins_differ_in_the_released_switches_alone(name):
    """In the evaluation, too: it runs on the same rollouts."""
    found = {key: twin for key, _, twin in released_differences(name) if key.startswith("data.")}
    assert found == {f"data.rollouts.{key}": value for key, value in RELEASED_SOD.items()} | {
        "data.lcb_examples": None, "data.prompts": "tool_reasoning_first_row",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "hub", "average"),
    [("0.6b", "SOD-0.6B", 24.22), ("1.7b", "SOD-1.7B", 42.98), ("4b", "SOD-GRPO_teacher-4B", 61.59)],
)
def test_sods_released_checkpoints_are_tested_as_released(model, hub, average, monkeypatch):
    monkeypatch.delenv("COMPACT_AGENTS_MODELS", raising=False)
    config = resolve(load(f"released_sod_qwen3_{model}", Project()), lambda name: name)
    about, data = config["experiment"], config["data"]["init_args"]
    assert (about["kind"], about["needs"]["base"]["hub"]) == ("test", f"youngzhong/{hub}")
    assert about["needs"]["base"]["path"] == config["model"]["init_args"]["policy"] == f"models/{hub}"
    assert str(average) in about["reproduces"] and about["columns"][0] == "average_of_sets/32"
    # run_eval_aime.sh, run_eval_livecodebench.sh
    assert (data["attempts"], data["eval_sampling"]) == (32, {"temperature": 1.0, "top_p": 0.6})
    assert (data["max_eval_prompt_tokens"], data["lcb_examples"], len(data["test_files"])) == (4096, None, 4)
    rollouts = data["rollouts"]["init_args"]
    assert (rollouts["max_turns"], rollouts["max_response_tokens"]) == (16, 20480)
    reward, protocol = rollouts["reward"]["init_args"], rollouts["protocol"]["init_args"]
    assert (reward["math"], reward["code_as_released"]) == ("strict_box", True)
    assert (protocol["call_format"], protocol["newline"]) == ("verl", False)
    assert protocol["tokenizer"] == rollouts["engine"]["init_args"]["model"] == f"models/{hub}"


@pytest.mark.parametrize(
    ("name", "training"),
    [("dgpo_qwen2.5_0.5b", {"model.as_released"}), ("kd_qwen2.5_0.5b", set()), ("sft_qwen2.5_0.5b", set())],
)
def test_dgpos_twins_differ_in_the_released_switches_alone(name, training):
    found = {key: twin for key, _, twin in released_differences(name)}
    scorer = [found.pop(key) for key in sorted(found) if "reward." in key or "answers." in key]
    student, qa = "models/Qwen2.5-0.5B-Instruct", "rollout.rewards.qa.SearchR1Released"
    assert scorer == [f"{qa}Reward", student, f"{qa}Answers", student]
    assert found.keys() == training | {"data.eval_sampling.temperature", "data.rollouts.protocol.opening_tag"}
    assert load(name + SUFFIX, Project())["experiment"]["reproduces"].endswith(("EM .329", "EM .298", "EM .275"))


def test_the_papers_average_is_the_first_column_of_its_table():
    """The seven sets count alike there; over questions, NQ's and PopQA's thousands are most of the mean."""
    for name in ("dgpo_qwen2.5_0.5b", "kd_qwen2.5_0.5b", "dgpo_qwen2.5_0.5b_as_released"):
        assert load(name, Project())["experiment"]["columns"][0] == "average_of_sets/1"
