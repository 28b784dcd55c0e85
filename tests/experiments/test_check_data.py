"""`make check-data`: counts, prompts, lengths, and every fault of every file in one go."""

import json

import polars as pl
import pytest

from experiments.commands.cli import main
from tests.end_to_end.test_own_data import write_own


@pytest.fixture
def words(tmp_path, monkeypatch, model_dir):
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path / "out"))
    return ["check-data", "my_grpo", "--values.accelerator=cuda", f"--paths.model={model_dir}", *write_own(tmp_path)]


def test_good_data_are_counted_and_shown(words, tmp_path, capsys):
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/c.jsonl: 40 passages" in said
    assert f"{tmp_path}/q.csv: 40 questions\n  train 32, val 4, test 4" in said
    assert said.count("<|im_start|>assistant") == 3 and "Where was Person 0 born?" in said
    assert "answer: Town 0" in said and "prompts, of 40: median" in said
    assert "left out" not in said and "no fault found" in said


def test_all_faults_of_all_files_come_at_once(words, tmp_path, capsys):
    with (tmp_path / "q.csv").open("a") as file:
        file.write("no answer,\n,no question\n")
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write('\n{oops\n{"head": "A"}\n')
    assert main(words) == 2
    said = capsys.readouterr().err
    for fault in (
        "q.csv: 2 lines cannot be used: line 42 with no gold answer; line 43 with an empty question",
        "c.jsonl, line 41: not JSON",
        "c.jsonl, line 42: body is None",
    ):
        assert fault in said


def test_a_corpus_in_another_form_is_read_and_many_faults_are_five_and_a_count(words, tmp_path, capsys):
    """A CSV file that is called .jsonl, and one of which most lines are wrong."""
    passages = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    pl.DataFrame(passages).write_csv(tmp_path / "c.jsonl")
    assert main(words) == 0
    assert f"{tmp_path}/c.jsonl: 40 passages\n" in capsys.readouterr().out
    lines = [f'{{"head": "A", "body": {number}}}\nno JSON {number}\n{{"head": "A"}}\n' for number in range(100)]
    (tmp_path / "c.jsonl").write_text('{"head": "A", "body": "good"}\n' + "".join(lines))
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) < 16 and max(map(len, said)) < 400
    assert f"  {tmp_path}/c.jsonl, 95 more lines: a fault of this kind" in said
    assert f"  {tmp_path}/c.jsonl, lines 4, 7, 10, 13, 16 and 95 more: body is None" in said[-1] + "".join(said)


def test_limits_that_no_prompt_keeps_are_faults(words, capsys):
    assert main([*words, "--data.max_prompt_tokens=5"]) == 2
    said = capsys.readouterr()
    assert "max_prompt_tokens is 5, but the shortest of 32 prompts has" in said.err
    assert main([*words, "--data.prompts_per_iteration=33"]) == 2
    assert "32 questions to train on, but prompts_per_iteration is 33" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["null", "1024"])
def test_prompts_that_do_not_fit_are_told_by_check_data_and_by_the_dry_run(words, tmp_path, capsys, limit):
    """A question of 12,000 words, in a file of which training has most."""
    with (tmp_path / "q.csv").open("a") as file:
        for number in range(12):
            file.write(f"{'word ' * 6000}{number}?,an answer\n")
    words.append(f"--data.max_prompt_tokens={limit}")
    assert main(words) == 0
    said = capsys.readouterr().out
    told = "max_prompt_tokens is 1024:" if limit == "1024" else "max_prompt_tokens is 4095 (what max_length leaves):"
    assert f"q.csv: {told}" in said and "questions with longer prompts (up to " in said and "(id q_" in said
    assert "count as unanswered: their prompts" in said and "no fault found" in said
    assert main(["dry-run", *words[1:]]) == 0
    dry = capsys.readouterr().err
    assert f"data: {tmp_path}/q.csv: {told}" in dry and "count as unanswered" in dry


def test_a_question_that_quotes_a_control_token_and_a_missing_corpus_are_told(words, tmp_path, capsys):
    (tmp_path / "c.jsonl").unlink()
    with (tmp_path / "q.csv").open("a") as file:
        file.write("What is <|im_end|>?,a token\n")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "quotes '<|im_end|>', a control token" in said and "c.jsonl: no such file" in said


def test_the_form_of_a_corpus_and_its_malformed_rows_are_told(words, tmp_path, capsys):
    (tmp_path / "c.jsonl").write_text('{"_id": "a", "text": "x"}\n{oops\n')
    words = [word for word in words if "corpus_columns" not in word]
    told = f"{tmp_path}/c.jsonl: 1 passages, 1 malformed line, read as {{_id, text}}; the id replaces"
    assert main(words) == 2
    said = capsys.readouterr()
    assert told in said.out and "c.jsonl, line 2: not JSON" in said.err
    assert main([*words, "--paths.skip_malformed=true"]) == 0
    said = capsys.readouterr().out
    assert told in said and "left out (skip_malformed):" in said and "c.jsonl, line 2: not JSON" in said


def test_a_refused_option_of_the_protocol_is_one_line(words, capsys):
    assert main([*words, "--data.rollouts.protocol.call_format", "qwen3_coder"]) == 2
    line = next(line for line in capsys.readouterr().err.splitlines() if "cannot be written" in line)
    assert "cannot be written: the chat template of" in line and "tried qwen3_coder" in line
