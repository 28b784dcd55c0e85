"""The tiny experiments of the shop are those of the household in another world, and depend on nothing else."""

from __future__ import annotations

import pytest

from experiments.registry.compose import Config
from experiments.stages.graph import Graph, closure


def parts(graph: Graph, name: str) -> tuple[Config, Config, Config]:
    """Arguments of the model, of the data without its rollouts, and of the rollouts."""
    config = graph.stage(name).config
    data = dict(config["data"]["init_args"])
    return config["model"]["init_args"], data, data.pop("rollouts")["init_args"]


def test_the_chain_needs_no_household_and_no_download(shipped):
    target = shipped.stage("sdar_shopping_tiny")
    chain = closure([target, *shipped.compared(target)])
    assert {stage.name for stage in chain} == {
        "world_shopping_tiny", "index_shopping_tiny", "shopping_init_tiny", "shopping_base_tiny",
        "expert_shopping_tiny", "expert_shopping_skilled_tiny", "sft_shopping_tiny", "grpo_shopping_tiny",
        "sdar_shopping_tiny",
    }  # fmt: skip
    assert not any(stage.needs for stage in chain)
    for stage in chain:
        about = stage.config["experiment"]
        assert "household" not in f"{about['summary']} {about['data']} {about['models']} {about.get('columns')}"


@pytest.mark.parametrize(("ours", "theirs"), [("grpo_shopping_tiny", "grpo_household_tiny"),
                                             ("sdar_shopping_tiny", "sdar_tiny")])  # fmt: skip
def test_the_shop_is_learnt_as_the_household_is(shipped, ours, theirs):
    (shop, data, rollouts), (house, other, its) = parts(shipped, ours), parts(shipped, theirs)
    for learner in (shop, house):
        assert learner["policy"] == learner["reference"]
    assert "sft_shopping_tiny" in shop["policy"]

    def differing(a: Config, b: Config) -> set[str]:
        return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}

    assert differing(shop, house) - {"skills"} == {"policy", "reference"}
    assert differing(data, other) == {"train_files", "val_files", "test_files", "iterations"}
    assert differing(rollouts, its) == {
        "engine", "protocol", "environment", "max_turns", "max_turn_tokens", "max_observation_tokens",
        "max_response_tokens",
    }  # fmt: skip
    assert differing(rollouts["protocol"]["init_args"], its["protocol"]["init_args"]) == {"tokenizer"}


def test_grpo_and_sdar_differ_in_what_the_teacher_says(shipped):
    (grpo, data, rollouts), (sdar, *rest) = parts(shipped, "grpo_shopping_tiny"), parts(shipped, "sdar_shopping_tiny")
    assert [data, rollouts] == rest
    added = {key: sdar[key] for key in sdar.keys() - grpo.keys()}
    assert added.keys() == {"skills", "gate", "beta", "skills_coef"} and grpo.items() <= sdar.items()
    assert added["skills"]["init_args"]["bank"] == "shopping_tiny"


def test_the_careless_half_keeps_its_failures_and_the_careful_half_has_skills(shipped):
    careless, careful = (
        shipped.stage(name).config["task"]["init_args"]
        for name in ("expert_shopping_tiny", "expert_shopping_skilled_tiny")
    )
    slips = [task["rollouts"]["init_args"]["engine"]["init_args"]["error_rate"] for task in (careless, careful)]
    assert slips == [0.4, 0.0] and [careless["keep"], careful["keep"]] == ["all", "correct"]
    assert "skills" not in careless["rollouts"]["init_args"]
    assert careful["rollouts"]["init_args"]["skills"]["init_args"]["bank"] == "shopping_tiny"


def test_texts_show_as_many_results_as_the_shop(shipped):
    shown = shipped.stage("world_shopping_tiny").config["task"]["init_args"]["shown"]
    assert parts(shipped, "sft_shopping_tiny")[2]["environment"]["init_args"]["topk"] == shown
