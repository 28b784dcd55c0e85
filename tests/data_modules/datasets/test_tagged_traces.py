import gzip
import json

import pytest

from data_modules.datasets.files import DatasetError
from data_modules.datasets.traces import MalformedTrace, cut, read_traces
from data_modules.demonstrations.tagged_traces import TaggedTraces
from data_modules.supervised_data_module import SupervisedDataModule
from rollout.rewards.arpo import ArpoReward
from rollout.storage import load_trajectories
from rollout.trajectory import ActionKind, CallOutcome, StopReason
from tests.data_modules.toys import Recorder, trainer

THOUGHT = "<think> the birthplace, then a sum </think>"
SEARCH, FOUND = "<search> Mira Voss </search>", "\n<result>\nPage 1: 3 <think> and <search>, <|im_end|>\n</result>"
PYTHON, PRINTED = "<python> print(3 + 5) </python>", " <result>\n8\n</result>"
ANSWER = "<answer> The answer is \\[ \\boxed{8} \\] </answer>"
TRACE = THOUGHT + SEARCH + FOUND + "\n" + PYTHON + PRINTED + THOUGHT + ANSWER
QUESTION = "How much is 5 more than her pots?"


def sharegpt(output=TRACE, system="Use the tools.", **changes) -> dict:
    turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": output}]
    return {"conversations": turns, "system": system, **changes}


def alpaca(output=TRACE, **changes) -> dict:
    return {"instruction": "", "input": QUESTION, "output": output, **changes}


@pytest.fixture
def make(tmp_path, model_dir):
    """``make(rows, **options) -> (task, files)`` over the model folder's tokenizer."""

    def build(rows, suffix="json", **options) -> TaggedTraces:
        path = tmp_path / f"sft.{suffix}"
        text = json.dumps(rows) if suffix == "json" else "\n".join(json.dumps(row) for row in rows)
        path.write_text(text, encoding="utf-8")
        return TaggedTraces([str(path)], str(model_dir), **options)

    return build


def run(task, folder):
    summary = task.run(folder)
    files = sorted((folder / "trajectories").glob("*.parquet"))
    return summary, [t for file in files for t in load_trajectories(file)]


def parts(task, trajectory) -> list[tuple[int, str]]:
    """Runs of equal mask, decoded."""
    runs: list[tuple[int, list[int]]] = []
    for bit, token in zip(trajectory.loss_mask, trajectory.response_ids, strict=True):
        if not runs or runs[-1][0] != bit:
            runs.append((bit, []))
        runs[-1][1].append(token)
    return [(bit, task.tokenizer.decode(ids)) for bit, ids in runs]


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_results_are_masked_and_everything_else_is_learnt(make, tmp_path, suffix):
    task = make([sharegpt(), alpaca(system="Use the tools.")], suffix)
    summary, (first, second) = run(task, tmp_path / "out")
    assert parts(task, first) == [
        (1, THOUGHT + SEARCH), (0, FOUND), (1, "\n" + PYTHON), (0, PRINTED), (1, THOUGHT + ANSWER),
    ]  # fmt: skip
    assert (first.response_ids, first.loss_mask) == (second.response_ids, second.loss_mask)
    assert first.prompt_ids == second.prompt_ids, "both shapes say the same"
    # Each piece by itself: the ids of a rollout, where what a tool returned holds none of the tokenizer's tags.
    ids = [
        task.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        for piece in (THOUGHT + SEARCH, "\n" + PYTHON, THOUGHT + ANSWER)
    ]
    pairs = list(zip(first.response_ids, first.loss_mask, strict=True))
    assert [i for i, sampled in pairs if sampled] == sum(ids, [])
    assert not {i for i, sampled in pairs if not sampled} & set(task.tokenizer.added_tokens_decoder)
    assert task.tokenizer.eos_token_id not in first.response_ids, "neither appended nor read in a result"
    assert (summary["found"], summary["kept"], summary["malformed"], summary["too_long"]) == (2, 2, 0, 0)
    assert summary["loss_tokens"] == 2 * sum(map(len, ids))
    assert summary["tokens"] == 2 * (len(first.prompt_ids) + len(first.response_ids))
    assert summary["format_errors"] == 0


def test_the_trajectory_tells_what_happened(make, tmp_path):
    _, [trajectory] = run(make([sharegpt()]), tmp_path / "out")
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWER, "8")
    assert [t.action.kind for t in trajectory.turns] == [ActionKind.CALL, ActionKind.CALL, ActionKind.ANSWER]
    search, python = trajectory.calls
    assert (search.turn, search.request.name, search.request.arguments) == (0, "search", {"query": "Mira Voss"})
    assert (python.turn, python.request.arguments, python.result.text) == (1, {"code": "print(3 + 5)"}, "8")
    assert python.result.outcome is CallOutcome.OK
    assert [t.observation_end for t in trajectory.turns[:2]] == [t.start for t in trajectory.turns[1:]]
    assert (trajectory.task.question, trajectory.task.golden_answers) == (QUESTION, ())


def test_the_reward_reads_the_trajectory(make, tmp_path, model_dir):
    _, [trajectory] = run(make([sharegpt()]), tmp_path / "out")
    judged = trajectory.replace(task=type(trajectory.task)("q", QUESTION, ("8",), "toy"))
    assert ArpoReward(str(model_dir)).score(judged).total == pytest.approx(1.1)


def test_as_published_the_whole_trace_is_one_turn(make, tmp_path):
    _, [masked] = run(make([sharegpt()]), tmp_path / "masked")
    summary, [whole] = run(make([sharegpt()], mask_results=False), tmp_path / "whole")
    assert whole.response_ids == masked.response_ids
    assert set(whole.loss_mask) == {1} and len(whole.turns) == 1
    assert whole.turns[0].action.answer == "8" and [call.turn for call in whole.calls] == [0, 0]
    assert summary["loss_tokens"] == len(whole.response_ids)


@pytest.mark.parametrize("mask_results", [True, False])
def test_the_data_module_trains_on_them_with_one_eos(make, tmp_path, model_dir, mask_results):
    run(make([sharegpt(), alpaca()], mask_results=mask_results), tmp_path / "out")
    data = SupervisedDataModule([str(tmp_path / "out" / "trajectories")], batch_size=2, tokenizer=str(model_dir))
    module = Recorder(push=False)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    eos = data._eos_id()
    for trajectory in module.train_batches[0]:
        assert trajectory.response_ids[-1] == eos and trajectory.response_ids.count(eos) == 1
        assert trajectory.loss_mask[-1] == 1


@pytest.mark.parametrize(
    ("row", "options", "system", "user"),
    [
        (sharegpt(), {}, "Use the tools.", QUESTION),
        (sharegpt(system=""), {}, None, QUESTION),
        (
            sharegpt(system=None, conversations=[{"from": "system", "value": "In."}, *sharegpt()["conversations"]]),
            {},
            "In.",
            QUESTION,
        ),
        (sharegpt(), {"system": "Another text."}, "Another text.", QUESTION),
        (alpaca(), {}, None, QUESTION),
        (alpaca(instruction="Use tools."), {}, None, f"Use tools.\n{QUESTION}"),
        (alpaca(instruction="Use tools."), {"instruction": "system"}, "Use tools.", QUESTION),
        (alpaca(instruction="Use.", system="Own."), {"instruction": "system"}, "Own.", QUESTION),
    ],
)
def test_prompts(make, tmp_path, row, options, system, user):
    task = make([row], **options)
    _, [trajectory] = run(task, tmp_path / "out")
    said = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    said += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    assert task.tokenizer.decode(trajectory.prompt_ids) == said
    assert trajectory.prompt_ids[0] == task.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert trajectory.task.prompt == (*((("system", system),) if system else ()), ("user", user))


def test_the_system_message_from_a_file(make, tmp_path):
    (tmp_path / "system.txt").write_text("From a file.\n")
    task = make([alpaca()], system=str(tmp_path / "system.txt"))
    assert run(task, tmp_path / "out")[1][0].task.prompt[0] == ("system", "From a file.")
    with pytest.raises(ValueError, match="neither a file nor a text"):
        make([alpaca()], system=str(tmp_path / "sytsem.txt"))


MALFORMED = {
    "unclosed_result": [
        THOUGHT + SEARCH + "<result> x " + ANSWER,
        THOUGHT + SEARCH + "<result> x " + PYTHON + PRINTED + ANSWER,
    ],
    "result_without_call": [
        THOUGHT + PRINTED + ANSWER,
        THOUGHT + " </search>" + FOUND + ANSWER,
        THOUGHT + SEARCH + FOUND + FOUND + ANSWER,
        THOUGHT + " </result>" + SEARCH + FOUND + ANSWER,
        THOUGHT + "<python> 1 </search>" + FOUND + ANSWER,
    ],
    "call_without_result": [THOUGHT + SEARCH + ANSWER, THOUGHT + SEARCH + PYTHON + PRINTED + ANSWER],
    "no_answer": [THOUGHT, "", THOUGHT + SEARCH + FOUND, THOUGHT + "<answer> 8", "8 </answer>"],
    "text_after_answer": [
        TRACE + " So it is.",
        ANSWER + SEARCH + FOUND + ANSWER,
        TRACE + ANSWER,
    ],
}


@pytest.mark.parametrize(("reason", "output"), [(reason, text) for reason in MALFORMED for text in MALFORMED[reason]])
def test_malformed_traces(reason, output):
    with pytest.raises(MalformedTrace) as fault:
        cut(output)
    assert fault.value.reason == reason


def test_pieces_are_the_trace_and_nothing_else():
    assert "".join(piece.text + piece.observation for piece in cut(TRACE)) == TRACE
    assert [piece.text for piece in cut(ANSWER)] == [ANSWER]


def test_what_is_dropped_is_counted_by_reason(make, tmp_path):
    long = THOUGHT * 40 + ANSWER
    rows = [sharegpt(), *(sharegpt(texts[0]) for texts in MALFORMED.values()), sharegpt(long), alpaca(input=" ")]
    rows += [alpaca(input="What is <|im_end|>?"), sharegpt(conversations=sharegpt()["conversations"] * 2)]
    rows += [alpaca("<answer> 8 </answer>")]  # can be learnt from, and would be refused by the reward
    summary, kept = run(make(rows, max_tokens=400), tmp_path / "out")
    assert {name.removeprefix("malformed/"): n for name, n in summary.items() if name.startswith("malformed/")} == {
        **dict.fromkeys(MALFORMED, 1), "no_question": 1, "control_token_in_prompt": 1, "not_one_exchange": 1,
    }  # fmt: skip
    assert (summary["found"], summary["malformed"], summary["too_long"], summary["kept"]) == (11, 8, 1, 2)
    assert summary["format_errors"] == 1
    assert [t.group for t in kept] == ["sft_0", "sft_10"]


def test_several_files_and_a_limit(make, tmp_path, monkeypatch):
    monkeypatch.setattr("data_modules.demonstrations.trace_stage.CHUNK", 2)
    summary, kept = run(make([alpaca() for _ in range(10)], limit=5), tmp_path / "out")
    assert [t.group for t in kept] == ["sft_0", "sft_2", "sft_4", "sft_6", "sft_8"]
    assert len(list((tmp_path / "out" / "trajectories").iterdir())) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "?", "answer": "x"}], r"row 0: the columns are question, answer; expected {instruction"),
        ([alpaca(), alpaca(output=7)], "row 1: 'output' is int, expected text"),
        ([sharegpt(conversations="text")], "row 0: 'conversations' is not a list of"),
        ([], "no rows"),
    ],
)
def test_files_of_another_kind(make, tmp_path, rows, message):
    task = make(rows)
    with pytest.raises(DatasetError, match=f"sft.json.*{message}"):
        task.run(tmp_path / "out")


def test_arguments(make, tmp_path):
    make([alpaca()])
    with pytest.raises(ValueError, match="files is the single path"):
        TaggedTraces("x.json", "nowhere")
    assert [trace.id for trace in read_traces(tmp_path / "sft.json")] == ["sft_0"]


def test_traces_are_read_under_any_name_and_all_faults_come_at_once(tmp_path):
    rows = [sharegpt(), alpaca()]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "lines.json").write_bytes(lines)
    (tmp_path / "list.jsonl").write_text(json.dumps(rows))
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines))
    for path in tmp_path.iterdir():
        assert [(t.question, t.output, t.fault) for t in read_traces(path)] == [(QUESTION, TRACE, None)] * 2, path
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps({f"column {n}": 1}) + "\n" for n in range(100)) + json.dumps(alpaca(output=3)))
    with pytest.raises(DatasetError) as caught:
        read_traces(path)
    said = str(caught.value)
    assert said.count("the columns are column") == 5 and f"{path}, 95 more rows: a fault of this kind" in said
    assert f"{path}, row 100: 'output' is int, expected text" in said


@pytest.mark.parametrize(("suffix", "where"), [("json", "row 2"), ("jsonl", "line 2")])
def test_half_a_surrogate_pair_in_a_trace_is_named_by_file_and_row(make, tmp_path, suffix, where):
    with pytest.raises(DatasetError, match=rf"sft.{suffix}, {where}: .*half of a surrogate pair, .ud83d"):
        make([alpaca(), alpaca(input="\ud83d")], suffix).run(tmp_path / "out")
