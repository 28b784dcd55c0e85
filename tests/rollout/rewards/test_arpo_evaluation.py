r"""ARPO's released evaluation. Every number is worked out by hand from docs/algorithms/arpo.md."""

import pytest

from rollout.rewards.arpo_evaluation import ArpoReleasedAnswers, released_answer, released_f1
from rollout.rewards.scoring import f1
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import Action, ActionKind, StopReason, Task, Trajectory, Turn


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<answer> It is \boxed{8} </answer>", "8"),
        (r"<answer> \boxed{1} </answer> no: <answer> \boxed{2} </answer>", "2"),
        ("<answer> Grey Harbor </answer>", "Grey Harbor"),
        (r"<answer> \boxed{5 \text{ cm}} </answer>", r"5 \text{ cm}"),
        (r"<answer> \boxed{\text{5 cm}} </answer>", "5 cm"),
        (r"<answer> \boxed{\text{5} or \text{6}} </answer>", r"5} or \text{6"),
        (r"so \boxed 12$ or so", r"\boxed 12$ or so"),
        (r"<answer> \boxed 12 and {x} y </answer>", r"\boxed 12 and {x}"),
        (r"<answer> \boxed{3} \boxed </answer>", r"\boxed"),
        (r"<answer> \boxed{3\}4} </answer>", "3\\"),
        (r"<answer> \fbox{3} </answer> \boxed{4}", r"\fbox{3}"),
        (r"\boxed{4}, \fbox{3}", "4"),
        ("so \\boxed{}\nor not", "so \\boxed{}\nor not"),
        (r"\boxed{3} <answer></answer> \boxed{4}", "4"),
        (r"\boxed{3} <answer> </answer>", ""),
        (r"<answer> 1 <answer> 2 </answer> 3 </answer>", "2 </answer> 3"),
        (r"so \boxed{3}, or rather \boxed{4}", "4"),
        ("1\n\n2\n3\n4\n\n5\n6", "2\n3\n4\n5\n6"),
        ("<answer></answer> x", "<answer></answer> x"),
        (" \n", None),
    ],
)
def test_where_the_released_evaluation_finds_an_answer(response, answer):
    assert released_answer(response) == answer


@pytest.mark.parametrize(
    ("answer", "gold", "released", "ours"),
    [
        ("Grey Harbor.", "Grey Harbor", 0.5, 1.0),
        ("Beyonce's sister", "Beyonces sister", 0.5, 1.0),
        ("-5", "5", 0.0, 1.0),
        ("yes it is", "yes", 0.5, 0.0),
    ],
)
def test_its_f1_keeps_punctuation(answer, gold, released, ours):
    assert (released_f1(answer, [gold, "another"]), f1(answer, [gold])) == (released, ours)


def test_a_trajectory_without_an_answer_is_scored_by_what_it_ends_with(model_dir):
    tokenizer = load_tokenizer(str(model_dir))

    def scored(text, ability, gold):
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        task = Task("q", "?", (gold,), "toy", metadata={"ability": ability})
        turn = Turn(0, len(ids), Action(ActionKind.INVALID), "length", 0, len(ids))
        mask, logprobs = (1,) * len(ids), (0.0,) * len(ids)
        return ArpoReleasedAnswers(str(model_dir)).score(
            Trajectory(task, (1,), ids, mask, logprobs, (turn,), (), StopReason.LENGTH, "q", 0)
        )

    assert scored(r"so \boxed{0.5}", "math", r"\frac{1}{2}") == ("0.5", {"em": 0.0, "f1": 0.0, "math": 1.0})
    assert scored("<answer> </answer>", "qa", "The") == ("", {"em": 1.0, "f1": 0.0})  # neither has a word
    assert scored("it is\nGrey Harbor", "qa", "Grey Harbor") == ("it is\nGrey Harbor", {"em": 0.0, "f1": 2 / 3})
