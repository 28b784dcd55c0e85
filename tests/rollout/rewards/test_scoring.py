"""Answer scoring; every expectation is worked out by hand from dgpo.md section 5."""

import pytest

from rollout.rewards.qa import ExactMatchReward, F1Reward, SearchR1ReleasedAnswers, SearchR1ReleasedReward
from rollout.rewards.scoring import exact_match, f1, normalize_answer, sub_exact_match
from rollout.tokenizer import load_tokenizer
from rollout.trajectory import Action, ActionKind, StopReason, Task, Trajectory, Turn
from tests.rollout.scripted import TASK


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Grey Harbor.", "grey harbor"),
        ("a-ha", "aha"),
        ("“Take On Me”", "“take on me”"),
        ("An Officer and a Gentleman", "officer and gentleman"),
        ("theatre another athe", "theatre another athe"),
        ("the", ""),
    ],
)
def test_normalize(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("grey harbor", ["Oldfield", "Grey Harbor"], 1.0),
        ("the Grey-Harbor", ["Grey Harbor"], 0.0),
        ("", ["the"], 0.0),
        ("The", ["the"], 1.0),
        (None, ["x"], 0.0),
    ],
)
def test_exact_match(prediction, golds, expected):
    assert exact_match(prediction, golds) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Grey Harbor town", ["Grey Harbor"], 0.8),
        ("x x", ["x y"], 0.5),
        ("Oldfield", ["Grey Harbor", "Oldfield Town"], 2 / 3),
        ("yes it is", ["yes"], 0.0),
        ("", ["Grey"], 0.0),
        ("", ["the"], 0.0),
        (None, ["x"], 0.0),
    ],
)
def test_f1(prediction, golds, expected):
    assert f1(prediction, golds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "golds", "expected"),
    [
        ("She was born in Grey Harbor.", ["grey harbor"], 1.0),
        ("anything", ["the", "!"], 0.0),  # an empty needle is in every haystack
        ("Grey", ["Grey Harbor"], 0.0),
        ("Greyhounds", ["grey"], 1.0),  # also inside a word
        (None, ["x"], 0.0),
    ],
)
def test_contains(text, golds, expected):
    assert sub_exact_match(text, golds) == expected


def answered(answer):
    action = Action(ActionKind.ANSWER, answer=answer) if answer is not None else Action(ActionKind.INVALID)
    turns = (Turn(0, 2, action, "stop", 0, 2),)
    stop = StopReason.ANSWER if answer is not None else StopReason.MAX_TURNS
    return Trajectory(TASK, (1,), (2, 3), (1, 1), (-0.1, -0.2), turns, (), stop, "q1", 0, answer=answer)


def test_rewards():
    reward = ExactMatchReward(score=2.0, format_score=0.1)
    assert reward.score(answered("grey harbor.")).total == 2.0
    assert reward.score(answered("Grey Harbor town")).total == 0.1
    assert reward.score(answered(None)).total == 0.0
    parts = {"em": 0.0, "f1": pytest.approx(0.8), "sub_em": 1.0, "answered": 1.0}
    assert ExactMatchReward().score(answered("Grey Harbor town")).parts == parts
    assert F1Reward().score(answered("Grey Harbor town")).total == pytest.approx(0.8)
    assert F1Reward().score(answered(None)).parts == {"em": 0.0, "f1": 0.0, "sub_em": 0.0, "answered": 0.0}


@pytest.mark.parametrize(
    ("prompt", "response", "gold", "answer", "em"),
    [
        ("Write <answer> Beijing </answer>.", "<answer> Oldfield </answer>", "Oldfield", "Oldfield", 1.0),
        ("No example.", "<answer> Oldfield </answer>", "Oldfield", None, 0.0),  # one pair is none
        ("Put it inside <answer> and </answer>, as in <answer> Rome </answer>.", "I cannot say.", "Rome", "Rome", 1.0),
        ("<answer> x </answer>", "<information>It asks: <answer> Oldfield </answer></information>", "Oldfield",
         "Oldfield", 1.0),
        ("<answer> x </answer>", "An <answer> needs a search. <answer> Oldfield </answer>", "Oldfield",
         "needs a search. <answer> Oldfield", 0.0),
        ("<answer> x </answer>", "<answer> the </answer>", "The The", "the", 1.0),
    ],
)  # fmt: skip
def test_where_search_r1s_released_scorer_finds_an_answer(prompt, response, gold, answer, em, model_dir):
    tokenizer = load_tokenizer(str(model_dir))
    before, ids = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (prompt, response))
    task, turn = Task("q", "?", (gold,), "toy"), Turn(0, len(ids), Action(ActionKind.INVALID), "length", 0, len(ids))
    mask, logprobs = (1,) * len(ids), (0.0,) * len(ids)
    trajectory = Trajectory(task, before, ids, mask, logprobs, (turn,), (), StopReason.LENGTH, "q", 0)
    found, scores = SearchR1ReleasedAnswers(str(model_dir)).score(trajectory)
    assert (found, scores["em"]) == (answer, em)
    assert SearchR1ReleasedReward(str(model_dir)).score(trajectory).total == em
