"""The supporting paragraphs of published rows, in their three shapes, become the gold passages of ARCap's diagnostic
prompts."""

from __future__ import annotations

import json

import polars as pl
import pytest

from data_modules.datasets.questions import load_tasks
from data_modules.evaluation_data import EvaluationData
from rollout.protocols.base import PromptMode
from tests.data_modules.datasets.test_data_questions import search_r1_row

POTS, HARBOR = ("Mira Voss", "She threw pots. She lived in Ilo."), ("Ilo", "A harbor.")
HOTPOT = {
    "type": "bridge",
    "supporting_facts": {"title": ["Mira Voss", "Ilo", "Mira Voss"], "sent_id": [0, 0, 1]},
    "context": {
        "title": ["Ilo", "Ena", "Mira Voss"],
        "sentences": [["A harbor."], ["A lake."], ["She threw pots.", " She lived in Ilo."]],
    },
}
TWO_WIKI = {**HOTPOT, "context": {"title": HOTPOT["context"]["title"], "content": HOTPOT["context"]["sentences"]}}
MUSIQUE = {
    "answerable": True,
    "question_decomposition": [
        {"question": "Who?", "support_paragraph": {"idx": 3, "title": "Mira Voss", "paragraph_text": POTS[1]}},
        {"question": "Where?", "support_paragraph": {"idx": 0, "title": "Ilo", "paragraph_text": HARBOR[1]}},
    ],
}
SHAPES = {"hotpotqa": HOTPOT, "2wiki": TWO_WIKI, "musique": MUSIQUE, "nested": {"metadata": MUSIQUE}}
NOT_IN_CONTEXT = {**HOTPOT, "supporting_facts": {"title": ["Ilo", "Elsewhere"], "sent_id": [0, 0]}}
EMPTY = {**MUSIQUE, "question_decomposition": [{"support_paragraph": {"title": "Ilo", "paragraph_text": " "}}]}


def parquet(folder, *rows):
    pl.DataFrame([search_r1_row(i, **row) for i, row in enumerate(rows)]).write_parquet(folder / "test.parquet")
    return str(folder / "test.parquet")


def flashrag(*metadata):
    asked = {"question": "Who?", "golden_answers": ["Mira"]}
    return [{"id": f"dev_{i}", **asked, "metadata": m} for i, m in enumerate(metadata)]


def jsonl(folder, name, *metadata):
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in flashrag(*metadata)))
    return f"{name}:{folder / 'dev.jsonl'}"


@pytest.mark.parametrize("shape", SHAPES)
def test_paragraphs_are_whole_in_the_order_named_and_each_once(tmp_path, shape):
    read = load_tasks(parquet(tmp_path, {"metadata": SHAPES[shape]}))
    name = {"nested": "musique"}.get(shape, shape)
    read += load_tasks(jsonl(tmp_path, name, SHAPES[shape]))
    assert [task.gold_passages for task in read] == [(POTS, HARBOR)] * 2
    assert read[1].golden_answers == ("Mira",) and read[1].data_source == name


def test_rows_that_name_none_or_lack_one_have_none_and_are_counted(tmp_path, caplog):
    own = [{"title": "Mine", "text": "Of my own."}]
    rows = [{"metadata": NOT_IN_CONTEXT, "gold_passages": None}, {"metadata": HOTPOT, "gold_passages": own}]
    found = load_tasks(parquet(tmp_path, *rows))
    assert [task.gold_passages for task in found] == [(), (("Mine", "Of my own."),)]
    assert "1 rows name supporting paragraphs that are not among those of the question; they have" in caplog.text
    caplog.clear()
    malformed = {"question_decomposition": 3}
    found = load_tasks(jsonl(tmp_path, "musique", MUSIQUE, EMPTY, {}, None, malformed))
    assert [len(task.gold_passages) for task in found] == [2, 0, 0, 0, 0]
    assert "dev.jsonl: 2 rows name supporting paragraphs" in caplog.text


def test_the_probes_run_on_them_and_the_rest_is_asked_without(tmp_path, make_system):
    files = [jsonl(tmp_path, "musique", MUSIQUE, {}, MUSIQUE)]
    data = EvaluationData(make_system(), test_files=files, diagnostic_prompts=["gold_think", "closed_book"])
    data.setup("test")
    agent, think, closed = data.test_dataloader()
    assert [len(loader.tasks) for loader in (agent, think, closed)] == [3, 2, 3]
    protocol = data.rollouts.protocol
    shown = protocol.decode(protocol.prompt_ids(think.tasks[0], PromptMode.GOLD_THINK))
    passages = 'Doc 1(Title: "Mira Voss") She threw pots. She lived in Ilo.\nDoc 2(Title: "Ilo") A harbor.'
    assert shown.endswith(f"<information>{passages}</information>\n\n")
    data.close()
