"""A judge in an evaluation: who is asked, what its verdicts and failures become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from callbacks.evaluation.evaluation import Evaluation
from callbacks.evaluation.judging import judge_rows
from callbacks.evaluation_rows import row_of
from rollout.rewards.judge import PROMPT_VERSION, Judge
from rollout.services.chat_client import ChatClient
from rollout.trajectory import Reward, StopReason
from tests.callbacks.helpers import EvaluationData, Hands, make_trajectory
from tests.rollout.serving import serving


@dataclass(frozen=True, slots=True)
class Verdict:
    correct: bool | None
    reply: str = ""
    error: str | None = None


class WordJudge:
    """Right is what shares a word with the question or a gold answer; fails on "unclear".

    Args:
        prompt_version: which wording.
        model: who judges.
    """

    def __init__(self, prompt_version: str = "v1", model: str = "words") -> None:
        self.prompt_version, self.model = prompt_version, model
        self.asked: list[tuple[str, tuple[str, ...], str]] = []

    def judge_all(self, items: Sequence[tuple[str, Sequence[str], str]]) -> list[Verdict]:
        self.asked += items
        verdicts = []
        for question, golds, answer in items:
            known = {word.lower() for text in (question, *golds) for word in text.split()}
            correct = None if answer == "unclear" else bool(known & set(answer.lower().split()))
            verdicts.append(Verdict(correct, "", "timed out" if correct is None else None))
        return verdicts


def trajectories():
    math = Reward(1.0, {"math": 1.0})
    return [
        make_trajectory("a", answer="the harbor, I think Harbor"),  # not exact, but right to the judge
        make_trajectory("b", answer="nonsense"),
        make_trajectory("c", answer="unclear"),
        make_trajectory("d", answer=None),
        make_trajectory("e", answer="1/2").replace(reward=math),
        make_trajectory("f", answer="grey harbor"),
        make_trajectory("g", stop=StopReason.INFRASTRUCTURE, answer="grey harbor"),
    ]


def test_who_is_asked_and_what_becomes_of_it(caplog):
    judge, given = WordJudge(), trajectories()
    rows = [row_of(t) for t in given] + [row_of(given[0], "closed_book")]
    judged = judge_rows(judge, rows, {t.task.id: t.task for t in given})
    assert [r.id for r in judged] == [r.id for r in rows]
    assert [r.judged for r in judged] == [1.0, 0.0, None, 0.0, 1.0, 1.0, None, None]
    assert [r.judge_failed for r in judged] == [False, False, True, False, False, False, False, False]
    asked = [answer for _, _, answer in judge.asked]
    assert asked == ["the harbor, I think Harbor", "nonsense", "unclear", "grey harbor"]
    assert judge.asked[0][:2] == ("Where was a born?", ("Grey Harbor",))
    assert "failed on 1 of 4 answers, last with: timed out" in caplog.text
    assert judge_rows(judge, [], {}) == []


def test_a_judge_that_loses_answers_is_an_error():
    class Forgets(WordJudge):
        def judge_all(self, items):
            return super().judge_all(items)[:-1]

    t = make_trajectory("a")
    with pytest.raises(ValueError, match="Forgets gave 0 verdicts on 1 answers"):
        judge_rows(Forgets(), [row_of(t)], {"a": t.task})


def test_figures_and_record_of_a_judged_test(trainer_for, tmp_path):
    judge, data = WordJudge(), EvaluationData({"agent": [trajectories()[:3], trajectories()[3:]]})
    trainer = trainer_for([Evaluation(judge=judge)])
    (metrics,) = trainer.validate(Hands(), datamodule=data, verbose=False)
    assert not judge.asked and "val/judge" not in metrics, "validations cost nothing"
    report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())
    assert "judge" not in report
    trainer.test(Hands(), datamodule=data, verbose=False)
    report = json.loads((tmp_path / "stage" / "evaluation.json").read_text())
    assert report["judge"] == {"prompt_version": "v1", "model": "words"}
    test = report["test"]
    assert (test["judge"]["mean"], test["judge"]["n"]) == (3 / 5, 5), "the failure is not counted as wrong"
    assert (test["judge_failures"]["mean"], test["judge_failures"]["n"]) == (pytest.approx(1 / 6), 6)
    assert test["em"]["n"] == 6


def test_the_real_judge_over_http():
    async def judged():
        verdict = {"choices": [{"message": {"role": "assistant", "content": "Correct"}}]}
        async with serving([verdict]) as served:
            judge = Judge(ChatClient([served.url], "judging-model"))
            rows = [row_of(t) for t in trajectories()]
            tasks = {t.task.id: t.task for t in trajectories()}
            return judge, await asyncio.to_thread(judge_rows, judge, rows, tasks), len(served.bodies)

    judge, rows, asked = asyncio.run(judged())
    assert [row.judged for row in rows] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, None] and asked == 4
    assert (judge.prompt_version, judge.model) == (PROMPT_VERSION, "judging-model")
