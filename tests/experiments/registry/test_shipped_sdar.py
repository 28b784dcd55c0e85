"""SDAR's experiments hold the published values (docs/algorithms/sdar.md), and differ in what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.registry import listing as registry
from experiments.registry.compose import Config
from experiments.registry.project import Project
from experiments.stages.graph import Graph, closure

PROJECT = Project()
MODELS = {"qwen2.5_3b": "Qwen2.5-3B-Instruct", "qwen2.5_7b": "Qwen2.5-7B-Instruct", "qwen3_1.7b": "Qwen3-1.7B"}
# tasks, turns, window, prompt and response tokens, rows of a mini-batch, c_KL, invalid action, warm-up
WORLDS = {
    "alfworld": (16, 50, 2, 2048 + 512, 256, 0.01, 0.1, 0),
    "webshop": (16, 15, 2, 4096 + 512, 64, 0.01, 0.1, 0),
    "search": (128, 4, 4, 4096 + 512, 256, 0.01, 0.01, 15),  # c_KL of the paper
}
TRAINED = ["grpo", "gigpo", "skill_grpo", "opsd", "opsd_released", "grpo_opsd", "skill_sd", "rlsd", "sdar"]
TESTED = ["untrained", "skill_prompt", "skill_grpo_skilled"]


def parts(config: Config) -> tuple[Config, Config, Config]:
    """Arguments of the model, the data and the rollouts."""
    data = config["data"]["init_args"]
    return config["model"]["init_args"], data, data["rollouts"]["init_args"]


def test_every_method_has_every_model_in_every_world():
    wanted = {f"{method}_{model}_{world}" for method in TRAINED + TESTED for model in MODELS for world in WORLDS}
    assert wanted <= set(registry.names(PROJECT))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model", MODELS)
def test_sdar_has_the_published_values(shipped, model, world):
    tasks, turns, window, length, rows, kl, invalid, warmup = WORLDS[world]
    config = shipped.stage(f"sdar_{model}_{world}").config
    learner, data, rollouts = parts(config)
    assert config["model"]["class_path"] == "lightning_modules.algorithms.sdar.SDAR"
    expected = {
        "lr": 1e-6, "warmup_steps": warmup, "weight_decay": 0.01, "max_grad_norm": 1.0, "clip_low": 0.2,
        "clip_high": 0.2, "dual_clip": 3.0, "aggregation": "token_mean", "kl_coef": kl, "reference_kl_estimator": "k3",
        "entropy_coef": 0.001, "group_statistics": "rows", "invalid_coef": invalid, "epochs": 1, "temperature": 1.0,
        "skills_coef": 0.01, "beta": 5.0, "gate": "gap", "signal": "gate", "teacher_weights": "current",
    }  # fmt: skip
    assert {k: learner[k] for k in expected} == expected
    assert learner["policy"] == learner["reference"] and Path(learner["policy"]).name == MODELS[model]
    shape = (data["prompts_per_iteration"], data["group_size"], data["iterations"])
    assert shape == (tasks, 8, 150)
    assert learner["num_mini_batches"] <= tasks * 8 * turns / rows, (
        "no step of more rows than the longest episodes give"
    )
    assert data["train_sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert data["eval_sampling"]["temperature"] == (0.0 if world == "search" else 0.4)
    assert config["trainer"]["val_check_interval"] == (50 if world == "search" else 5)
    assert (rollouts["max_turns"], rollouts["max_turn_tokens"], rollouts["final_turn"]) == (turns, 512, False)
    assert rollouts["max_response_tokens"] == turns * 512 and rollouts["engine"]["init_args"]["max_length"] == length
    protocol = rollouts["protocol"]["init_args"]
    assert protocol["window"] == window and protocol["thinking"] is (False if model == "qwen3_1.7b" else None)
    assert rollouts.get("skills") is None, "the student never sees them"


def test_rewards_ends_and_what_is_searched(shipped):
    def rollouts(world: str) -> Config:
        return parts(shipped.stage(f"sdar_qwen2.5_7b_{world}").config)[2]

    household, shop, search = rollouts("alfworld"), rollouts("webshop"), rollouts("search")
    assert household["environment"]["init_args"]["reward"] == shop["environment"]["init_args"]["reward"] == 10.0
    assert household["environment"]["init_args"]["engine"] == "alfworld"
    assert "reward" not in household and "reward" not in shop, "these worlds score themselves"
    assert search["reward"]["class_path"] == "rollout.rewards.qa.ExactMatchReward"
    assert search["environment"]["init_args"]["tools"]["search"]["init_args"]["topk"] == 3
    assert [p["protocol"]["init_args"].get("fallback_characters", 30) for p in (household, shop)] == [30, 20]


def test_which_rule_retrieves_skills_and_from_which_bank(shipped):
    def skills(world: str, owner: str) -> tuple[str, Config]:
        name = {"teacher": "sdar", "student": "skill_grpo"}[owner]
        learner, _, rollouts = parts(shipped.stage(f"{name}_qwen2.5_7b_{world}").config)
        found = (learner if owner == "teacher" else rollouts)["skills"]["init_args"]
        assert found["retriever"]["class_path"] == "rollout.skills.retrieval.Keyword"
        return found["bank"], found["retriever"].get("init_args") or {}

    assert skills("alfworld", "teacher") == ("household", {"path": True})
    assert skills("alfworld", "student") == ("household", {})
    assert skills("webshop", "teacher") == skills("webshop", "student") == ("shopping", {})
    assert (
        skills("search", "teacher")
        == skills("search", "student")
        == (
            "search",
            {"data_source": True, "compare": True, "unknown_sources": "refuse"},
        )
    )


@pytest.mark.parametrize(
    ("method", "class_name", "changed"),
    [
        ("grpo", "EpisodeGRPO", {}),
        ("gigpo", "GiGPO", {"turn_weight": 1.0, "gamma": 0.95, "turn_norm": "mean_std_norm"}),
        ("skill_sd", "SkillSD", {"skills_coef": 0.001}),
        ("rlsd", "RLSD", {"skills_coef": 0.5, "decay_iterations": 100, "rlsd_clip": 0.2}),
        ("opsd_released", "SDAR", {"use_grpo": False, "beta": 5.0, "skills_coef": 0.01, "gate": "gap"}),
        ("opsd", "SDAR", {"use_grpo": False, "signal": "reverse_kl", "gate": "none", "teacher_weights": "fixed"}),
        ("opsd_current", "SDAR", {"use_grpo": False, "signal": "reverse_kl", "teacher_weights": "current"}),
        ("grpo_opsd", "SDAR", {"beta": 0.0, "skills_coef": 0.01, "gate": "gap"}),
        ("sdar_beta_1", "SDAR", {"beta": 1.0}),
        ("sdar_coef_0.001", "SDAR", {"skills_coef": 0.001}),
        ("sdar_entropy", "SDAR", {"gate": "entropy"}),
        ("sdar_reverse_kl", "SDAR", {"signal": "reverse_kl", "gate": "gap"}),
        ("sdar_jsd", "SDAR", {"signal": "jsd", "gate": "gap"}),
    ],
)
def test_a_method_differs_from_sdar_in_its_own_settings_only(shipped, method, class_name, changed):
    main = shipped.stage("sdar_qwen2.5_7b_alfworld").config
    other = shipped.stage(f"{method}_qwen2.5_7b_alfworld").config
    learner, data, _ = parts(other)
    assert other["model"]["class_path"].rpartition(".")[2] == class_name
    assert {k: learner[k] for k in changed} == changed
    own = {"gate", "beta", "signal", "skills_coef", "skills", "teacher_weights", *changed}
    ours = parts(main)[0]
    assert {k: v for k, v in learner.items() if k not in own} == {k: v for k, v in ours.items() if k not in own}
    assert data == parts(main)[1]


@pytest.mark.parametrize("retrieval", ["random", "full", "ucb"])
def test_a_retrieval_differs_in_the_teacher_s_skills_only(shipped, retrieval):
    main, other = (parts(shipped.stage(f"{n}_qwen2.5_7b_alfworld").config) for n in ("sdar", f"sdar_{retrieval}"))
    assert other[1] == main[1]
    assert {k for k in main[0] if main[0][k] != other[0][k]} == {"skills"}
    retriever = other[0]["skills"]["init_args"]["retriever"]
    assert retriever["class_path"].rpartition(".")[2].lower() == retrieval and not retriever.get("init_args")


@pytest.mark.parametrize("world", WORLDS)
def test_skills_in_the_student_s_prompt(shipped, world):
    name = f"qwen2.5_7b_{world}"
    plain, skilled = (parts(shipped.stage(f"{n}_{name}").config) for n in ("grpo", "skill_grpo"))
    assert skilled[0] == plain[0] and skilled[1]["eval_skills"] is False
    skills = skilled[2]["skills"]["init_args"]
    room = [r[2]["engine"]["init_args"]["max_length"] for r in (plain, skilled)]
    assert room[1] - room[0] == skills["max_tokens"], "nothing else gives way to them"
    again, prompted = shipped.stage(f"skill_grpo_skilled_{name}"), shipped.stage(f"skill_prompt_{name}")
    for stage in (again, prompted):
        assert stage.kind == "test" and stage.config["data"]["init_args"].get("eval_skills", True)
        assert parts(stage.config)[2]["skills"] == skilled[2]["skills"]
    assert f"skill_grpo_{name}" in {stage.name for stage in again.upstream}
    untrained = shipped.stage(f"untrained_{name}")
    assert untrained.kind == "test" and parts(untrained.config)[2].get("skills") is None


def test_seen_and_unseen_games_are_tested_apart(shipped):
    seen, unseen = (shipped.stage(f"{n}_qwen3_1.7b_alfworld") for n in ("sdar", "unseen_sdar"))
    files = [[Path(f).name for f in parts(stage.config)[1]["test_files"]] for stage in (seen, unseen)]
    assert files == [["test_seen.parquet"], ["test_unseen.parquet"]]
    assert seen in closure([unseen])
    assert parts(seen.config)[1]["eval_sampling"] == parts(unseen.config)[1]["eval_sampling"]


def test_a_user_s_own_skills_and_data(tmp_path):
    from experiments.registry.overrides import parse

    chosen = parse(["--paths.skills", "/mine/skills.json", "--paths.alfworld", "/mine/alfworld"])
    graph = Graph(Project(outputs=tmp_path), "sdar_qwen2.5_7b_alfworld", chosen)
    stage = graph.target()
    assert parts(stage.config)[0]["skills"]["init_args"]["bank"] == "/mine/skills.json"
    world = next(s for s in closure([stage]) if s.name == "world_alfworld")
    assert world.config["task"]["init_args"]["folder"] == "/mine/alfworld"
    assert [need.path for need in world.needs] == ["/mine/alfworld/json_2.1.1"]
