"""Small files of the shapes that the four papers published, with the faults that the real ones have; the rows are ours.

Sources of the shapes: Search-R1's nq_hotpotqa, and the repositories that docs/algorithms/ names.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from tests.data_modules.datasets import test_agent_rl_files as agent_rl
from tests.data_modules.datasets.test_benchmarks import PUBLISHED, rl_row
from tests.data_modules.datasets.test_chat_traces import TWO_ROUNDS
from tests.data_modules.datasets.test_data_questions import search_r1_row
from tests.data_modules.datasets.test_gold_paragraphs import EMPTY, HOTPOT, MUSIQUE, NOT_IN_CONTEXT, TWO_WIKI, flashrag
from tests.data_modules.datasets.test_livecodebench import cases, official, packed
from tests.data_modules.datasets.test_tagged_traces import alpaca

SEVEN = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
BLANK = {"ground_truth": "  ", "style": "rule"}
UNANSWERED = {**TWO_ROUNDS, "messages": TWO_ROUNDS["messages"][:1]}

# Environment variable of the folder -> file -> (rows, of these dropped). Files that a recipe refuses to cut have no
# faulty rows: what is odd in them is read.
Rows = list[dict]


def search_r1(rows: int, sources: tuple[str, ...]) -> Rows:
    """Ids that repeat from source to source; golds in one of two columns; HotpotQA's struct of paragraphs."""
    made = []
    for source in sources:
        for i in range(rows):
            context = {"title": ["A"], "sentences": [["One."]]} if source == "hotpotqa" else None
            made.append(search_r1_row(i, data_source=source, metadata={"type": "bridge", "context": context}))
    made[1]["golden_answers"] = None  # stands in reward_model.ground_truth.target
    return made


def shapes() -> dict[str, dict[str, tuple[Rows, int]]]:
    blank = search_r1_row(9, golden_answers=[" "], reward_model={"style": "rule", "ground_truth": {"target": [""]}})
    nq = [*search_r1(3, ("nq", "hotpotqa")), {**blank, "metadata": {"type": None, "context": None}}]
    arpo = [rl_row(i, ability=("math", "qa", None)[i % 3]) for i in range(9)]
    hle = [
        rl_row(0, ability=None, data_source="hle", reward_model={"ground_truth": "B", "style": "rule"}),
        rl_row(1, ability=None, data_source="hle", reward_model={"ground_truth": "\\frac{7}{3}", "style": "rule"}),
        rl_row(2, ability=None, data_source="hle", reward_model={"ground_truth": "a fox, then a hen", "style": "rule"}),
    ]
    programs = [  # as many outputs as inputs are wanted, and tests at all
        agent_rl.row("train-code-taco-hard", "Double it.", json.dumps({"inputs": ["1"], "outputs": []}), 7),
        agent_rl.row("mega-science", "Which?", "", 8, ability="science"),
    ]
    qa = {"question": "Who threw it?", "answer": ["Mira Voss"]}
    benchmarks = {
        name: [{**PUBLISHED[name]}] * 3 for name in ("aime24", "aime25", "math500", "gsm8k", "math", "gaia", "xbench")
    } | {name: [qa] * 3 for name in ("webwalker", "hotpotqa", "2wiki", "musique", "bamboogle")}
    benchmarks["hle"] = [
        {"question": "Which?", "answer": "C", "answer_type": "multipleChoice", "image": ""},
        {"question": "How many?", "answer": 12, "answer_type": "exactMatch", "image": ""},
    ]
    benchmarks["simpleqa"] = [{"question": "Who?", "answer": "Mira"}, {"problem": "When?", "answer": "1666"}]
    private = official(private_test_cases=packed(cases(("30\n", "60\n"))))
    return {
        "COMPACT_AGENTS_QUESTIONS": {"train.parquet": (nq, 1), "test.parquet": (search_r1(2, SEVEN), 0)},
        "COMPACT_AGENTS_ARPO": {
            "train_10k.parquet": ([*arpo, rl_row(9, reward_model=BLANK)], 1), "valid.parquet": (arpo[:4], 0),
        },
        "COMPACT_AGENTS_ARPO_SEARCH": {
            "hard_search_1k.parquet": ([rl_row(i, ability=None, data_source="DR_nan") for i in range(4)], 0),
            "gaia_test.parquet": (arpo[:2], 0), "hle_test.parquet": (hle, 0),
        },
        "COMPACT_AGENTS_BENCHMARKS": {f"{name}.jsonl": (rows, 0) for name, rows in benchmarks.items()},
        "COMPACT_AGENTS_ARPO_SFT": {
            "final_sft_edition9.json": ([alpaca(), alpaca("no tags at all"), {"conversations": []}], 0),
        },
        "COMPACT_AGENTS_FLASHRAG": {
            "hotpotqa/dev.jsonl": (flashrag(HOTPOT, NOT_IN_CONTEXT), 0),
            "2wikimultihopqa/dev.jsonl": (flashrag(TWO_WIKI), 0), "musique/dev.jsonl": (flashrag(MUSIQUE, EMPTY), 0),
        },
        "COMPACT_AGENTS_OPEN_AGENTRL": {"Open-AgentRL-30K.parquet": ([*agent_rl.MIXED, *programs], 2)},
        "COMPACT_AGENTS_OPEN_AGENTRL_EVAL": {
            "aime2024/aime_2024_problems.parquet": ([{"ID": "2024-I-1", "Problem": "How many?", "Answer": 33}], 0),
            "aime2025/aime_2025_problems.parquet": ([{"problem": "How many?", "answer": "70"}], 0),
            "gpqa-diamond/gpqa_diamond.parquet": ([PUBLISHED["gpqa_diamond"]], 0),
            "livecodebench-v6/lcb_v6_2502_2505.parquet": ([private], 0),
        },
        "COMPACT_AGENTS_OPEN_AGENTRL_SFT": {
            "full_sft_3k_shuffled_v4.parquet": ([TWO_ROUNDS, UNANSWERED], 0),
        },
    }  # fmt: skip


def write_published(folder: Path) -> dict[str, str]:
    """Write all of them; returns the environment variables that point there."""
    for variable, files in shapes().items():
        for name, (rows, _) in files.items():
            path = folder / variable / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                pl.DataFrame(rows, infer_schema_length=None).write_parquet(path)
            elif path.suffix == ".json":
                path.write_text(json.dumps(rows))
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {variable: str(folder / variable) for variable in shapes()}
