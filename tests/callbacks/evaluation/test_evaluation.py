from __future__ import annotations

import json
import math
import re

import polars as pl
import pytest

from callbacks.evaluation.arcap import ARCap, arcap
from callbacks.evaluation.evaluation import Evaluation, summarize, update_evaluation_file
from callbacks.evaluation_rows import contains_answer, record_of, row_of, save_rows, search_hits
from rollout.trajectory import ActionKind, CallOutcome, Document, StopReason, ToolCall, ToolRequest, ToolResult
from tests.callbacks.helpers import EvaluationData, Hands, make_call, make_trajectory

HIT, MISS = ("The potter lived in Grey Harbor.",), ("Nothing of note.",)


@pytest.mark.parametrize(
    ("text", "gold", "found"),
    [
        ("He was born in the Grey Harbor, long ago", "grey harbor", True),
        ("Born in Hartley", "art", False),  # a plain substring test says yes
        ("The art, of war", "Art of war", True),  # punctuation is deleted on both sides
        ("grey old harbor", "grey harbor", False),  # not consecutive
        ("anything", "The", False),  # normalises to nothing
        ("harbor", "grey harbor", False),
    ],
)
def test_contains_answer_matches_whole_words(text, gold, found):
    assert contains_answer(Document("1", "Unrelated", text, 1.0), [gold]) is found


def test_the_title_counts_and_any_gold_answer_counts():
    document = Document("1", '"Grey Harbor"', "A town.", 1.0)
    assert contains_answer(document, ["nope", "Grey Harbor"])


def test_hits_count_executed_searches_only():
    refused = make_call(0, "q", HIT, CallOutcome.REFUSED)
    infrastructure = make_call(0, "q", HIT, CallOutcome.INFRASTRUCTURE)
    empty = make_call(0, "q", (), CallOutcome.EMPTY)
    assert search_hits(make_trajectory(calls=())) == (0.0, 0.0)
    assert search_hits(make_trajectory(calls=(refused, infrastructure))) == (0.0, 0.0)
    assert search_hits(make_trajectory(calls=(refused, make_call(0, "q", HIT)))) == (1.0, 1.0)
    assert search_hits(make_trajectory(calls=(make_call(0, "q", MISS), make_call(1, "q", HIT)))) == (0.0, 1.0)
    assert search_hits(make_trajectory(calls=(empty, make_call(1, "q", HIT)))) == (0.0, 1.0)
    assert row_of(make_trajectory(calls=(refused, empty, make_call(1, "q", HIT)))).executed_searches == 2


def agent_trajectories():
    """Four scored ones over two sources, and one that the infrastructure spoiled (with a right answer)."""
    invalid = (ActionKind.INVALID, ActionKind.CALL, ActionKind.ANSWER)
    return [
        make_trajectory("a", calls=(make_call(0, "q", HIT),)),
        make_trajectory("b", answer="Grey Bay", calls=(make_call(0, "q", MISS), make_call(1, "q", HIT)), kinds=invalid),
        make_trajectory("c", answer=None, stop=StopReason.MAX_TURNS, source="two_hop", kinds=(ActionKind.INVALID,)),
        make_trajectory("d", answer="Nowhere", source="two_hop"),
        make_trajectory("e", stop=StopReason.INFRASTRUCTURE, calls=(make_call(0, "q", HIT),)),
    ]


def test_summary_by_hand():
    figures = summarize([row_of(t) for t in agent_trajectories()])
    means = {name: figure.mean for name, figure in figures.items()}
    assert means["em"] == 0.25 and figures["em"].n == 4
    assert means["f1"] == pytest.approx((1 + 0.5 + 0 + 0) / 4)  # "grey bay" shares 1 of 2 tokens
    assert means["em/one_hop"] == 0.5 and means["em/two_hop"] == 0.0 and figures["em/two_hop"].n == 2
    assert means["stop/answer"] == 0.75 and means["stop/max_turns"] == 0.25 and means["stop/eos"] == 0.0
    assert "stop/infrastructure" not in figures
    assert means["searches"] == 0.75
    assert means["response_tokens"] == (8 + 12 + 4 + 8) / 4
    assert means["valid_actions"] == pytest.approx(6 / 8) and figures["valid_actions"].n == 8
    assert means["infrastructure_failures"] == 0.2 and figures["infrastructure_failures"].n == 5


def test_probes_do_not_enter_the_agent_figures_and_give_arcaps_components():
    rows = [row_of(t) for t in agent_trajectories()]
    rows += [row_of(make_trajectory("a"), "gold_direct"), row_of(make_trajectory("b", answer="x"), "gold_direct")]
    rows += [row_of(make_trajectory("a", source="two_hop"), "gold_think")]
    rows += [row_of(make_trajectory("a", answer=None), "closed_book")]
    rows += [row_of(make_trajectory("z", stop=StopReason.INFRASTRUCTURE), "closed_book")]
    assert summarize(rows)["em"].n == 4
    means = {name: (figure.mean, figure.n) for name, figure in arcap(rows).items()}
    assert means["arcap/source_referencing"] == (0.5, 2)
    assert means["arcap/thinking"] == means["arcap/thinking/two_hop"] == (1.0, 1)
    assert means["arcap/closed_book"] == (0.0, 1)
    assert means["arcap/hit_first"] == (0.25, 4) and means["arcap/hit_any"] == (0.5, 4)
    assert means["arcap/hit_any/one_hop"] == (1.0, 2) and means["arcap/hit_any/two_hop"] == (0.0, 2)
    assert means["arcap/searches"] == (0.75, 4)
    assert "arcap/thinking" not in arcap([row_of(make_trajectory())])  # not run is not zero


def test_rows_round_trip(tmp_path):
    rows = [row_of(t) for t in agent_trajectories()]
    save_rows(tmp_path / "evaluation" / "test.parquet", rows)
    assert pl.read_parquet(tmp_path / "evaluation" / "test.parquet").to_dicts() == [
        record_of(row, tools=["search"], parts=[]) for row in rows
    ]


def test_trainer_writes_the_files_and_logs_the_metrics(trainer_for, tmp_path):
    first, second = agent_trajectories()[:3], agent_trajectories()[3:]
    data = EvaluationData({"agent": [first, second, []], "gold_direct": [[make_trajectory("a")]], "closed_book": [[]]})
    trainer = trainer_for([ARCap(), Evaluation()])  # either order must do
    (metrics, *_) = trainer.test(Hands(), datamodule=data, verbose=False)
    assert metrics["test/em"] == 0.25 and metrics["test/em_n"] == 4.0
    assert metrics["test/em_low"] == 0.0 and metrics["test/em_high"] > 0.5
    assert metrics["test/arcap/source_referencing"] == 1.0
    assert not [name for name, value in metrics.items() if math.isnan(value)]

    stage = tmp_path / "stage"
    report = json.loads((stage / "evaluation.json").read_text())
    assert report["test"]["em"] == {"mean": 0.25, "low": 0.0, "high": pytest.approx(metrics["test/em_high"]), "n": 4}
    assert report["test"]["arcap/hit_any"]["n"] == 4 and "arcap/closed_book" not in report["test"]
    assert report["seconds"] > 0 and report["command"] and re.match(r"[0-9a-f]{40}|unknown", report["commit"])
    frame = pl.read_parquet(stage / "evaluation" / "test.parquet")
    assert frame["id"].to_list() == ["a", "b", "c", "d", "e", "a"]
    assert set(frame["prompt_mode"]) == {"agent", "gold_direct"} and frame["failed"].sum() == 1

    trainer.validate(Hands(), datamodule=data, verbose=False)
    report = json.loads((stage / "evaluation.json").read_text())
    assert report["val"]["em"]["n"] == report["test"]["em"]["n"] == 4


def test_a_released_evaluation_reads_and_scores_the_answers_of_the_test_alone(trainer_for, tmp_path):
    class Answers:
        def score(self, trajectory):
            return f"{trajectory.answer}, read anew", {"em": 0.0, "f1": 0.25, "math": 1.0}

    data = EvaluationData({"agent": [[make_trajectory("a")], [make_trajectory("b")]]})
    trainer = trainer_for([Evaluation(answers=Answers())])
    trainer.test(Hands(), datamodule=data, verbose=False)
    trainer.validate(Hands(), datamodule=data, verbose=False)
    [stage] = {path.parent for path in tmp_path.rglob("evaluation.json")}
    report = json.loads((stage / "evaluation.json").read_text())
    assert [report["test"][name]["mean"] for name in ("em", "f1", "acc")] == [0.0, 0.25, 1.0]
    assert report["val"]["em"]["mean"] == 1.0
    frame = pl.read_parquet(stage / "evaluation" / "test.parquet")
    assert frame["answer"].to_list() == [f"{make_trajectory().answer}, read anew"] * 2


def test_figures_of_another_owner_stay_and_stale_ones_of_ones_own_go(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"test": {"em/old": 1, "arcap/thinking": 2}, "val": {"em": 3}}))
    update_evaluation_file(path, "test", {}, lambda name: not name.startswith("arcap/"), {"seconds": 1.0})
    assert json.loads(path.read_text()) == {"test": {"arcap/thinking": 2}, "val": {"em": 3}, "seconds": 1.0}


def test_unnamed_dataloaders_and_wrong_outputs_are_errors(trainer_for):
    data = EvaluationData({"agent": [[make_trajectory()]], "gold_think": [[make_trajectory()]]})
    data.prompt_modes = None
    with pytest.raises(ValueError, match="no prompt_modes"):
        trainer_for([Evaluation()]).test(Hands(), datamodule=data, verbose=False)

    class Forgets(Hands):
        def test_step(self, batch, batch_idx, dataloader_idx=0):
            return None

    with pytest.raises(TypeError, match="test_step returned NoneType"):
        one = EvaluationData({"agent": [[make_trajectory()]]})
        trainer_for([Evaluation()]).test(Forgets(), datamodule=one, verbose=False)


def test_hits_as_released_are_raw_and_those_of_ours_are_words():
    """By hand: (gold, what two searches returned, ours at first and at any, as released)."""
    cases = [
        ("art", ("a party", "none"), (0.0, 0.0), 1.0),
        ("Mira", ("mira was here", "none"), (1.0, 1.0), 0.0),
        ("Ilo", ("none", "the port of Ilo."), (0.0, 1.0), 1.0),
        ("the harbor", ("a harbor", "none"), (1.0, 1.0), 0.0),
        ("", ("anything", "none"), (0.0, 0.0), 0.0),
    ]
    for gold, texts, ours, released in cases:
        results = [ToolResult(text, CallOutcome.OK, (Document("1", "", text, 1.0),)) for text in texts]
        calls = tuple(ToolCall(turn, ToolRequest("search", {}), result, 0.0) for turn, result in enumerate(results))
        row = row_of(make_trajectory(gold=(gold,), calls=calls))
        assert ((row.hit_first, row.hit_any), row.hit_raw) == (ours, released), gold
    assert row_of(make_trajectory(gold=("Ilo",))).hit_raw == 0.0
    assert arcap([row])["arcap/hit_raw"].mean == 0.0
