"""Programs as command lines: results, limits, and that nothing of a bad one is left."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from rollout.programs.base import ProgramError
from rollout.programs.commands import MARK, CommandProgram, result_of
from rollout.trajectory import StopReason, split_turns
from tests.rollout.programs.playing import END, SAMPLING, TASK, play, system_of

YES = lambda text, n: f"yes{END}"  # noqa: E731
ASK = """
curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Content-Type: application/json" \
    -d '{"messages": [{"role": "user", "content": "'"$TASK_QUESTION"'"}]}' """


def sh(script, **options):
    return CommandProgram(["sh", "-c", script], **options)


def marked(folder: Path) -> list[int]:
    """Processes of rollouts with temporary folders in ``folder`` that are still alive."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            found += [pid] * (MARK.encode() in variables and f"TMPDIR={folder}/".encode() in variables)
        except OSError:
            pass
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_a_shell_script_with_curl(protocol):
    said = f'{ASK} | grep -o \'"content": *"[^"]*"\' >&2; echo \'{{"reward": 0.5, "answer": "yes"}}\''
    trajectory = play(system_of(protocol, YES, sh(said)))
    assert trajectory.stop_reason is StopReason.PROGRAM_DONE and trajectory.reward.total == 0.5
    assert trajectory.answer == "yes" and len(split_turns(trajectory)[0].turns) == 1
    assert TASK.question in protocol.decode(trajectory.prompt_ids)


def test_openais_client_reads_the_environment(protocol, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, openai\n"
        "task = json.load(open(os.environ['TASK_FILE']))\n"
        "said = openai.OpenAI().chat.completions.create(\n"
        "    model=os.environ['OPENAI_MODEL'], messages=[{'role': 'user', 'content': task['question']}])\n"
        "print('Some log.')\n"
        "print(float(said.choices[0].message.content == 'yes' and task['golden_answers'] == ['25']))\n"
    )
    trajectory = play(system_of(protocol, YES, CommandProgram(["python", str(script)])))
    assert trajectory.reward is not None and trajectory.reward.total == 1.0, trajectory


def test_gold_answers_are_not_where_a_coding_agent_looks(protocol):
    trajectory = play(system_of(protocol, YES, sh('test -s "$TASK_FILE" && echo "files: $(ls -A)"')))
    assert trajectory.answer == "files:"


@pytest.mark.parametrize(
    "line, reward, answer",
    [("0.5", 0.5, None), ("true", 1.0, None), ('{"answer": "a b"}', None, "a b"), ("null", None, None),
     ("The answer is 5.", None, "The answer is 5."), ('"5"', None, "5"), ("[1]", None, "[1]"),
     ("[" * 99999, None, "[" * 99999), ('{"answer": "\\ud800"}', None, "\ufffd")],
)  # fmt: skip
def test_the_last_line_is_the_result(line, reward, answer):
    result = result_of(line)
    assert (result.reward, result.answer) == (reward, answer)


def test_results_of_another_form_are_faults():
    for line in ('{"score": 1}', '{"reward": "high"}', "NaN"):
        with pytest.raises(ProgramError):
            result_of(line)


@pytest.mark.parametrize("script, reward", [("exit 0", 1.0), ("exit 3", 0.0), ("kill -9 $$", None)])
def test_the_exit_code_as_reward(script, reward, protocol):
    trajectory = play(system_of(protocol, YES, sh(f"{ASK} >/dev/null; {script}", result="exit_code")))
    assert (None if trajectory.reward is None else trajectory.reward.total) == reward


BAD = {
    "dies": ("echo no >&2; exit 7", StopReason.PROGRAM_FAILED, "it ended with code 7: ... no"),
    "hangs": ("sleep 600", StopReason.PROGRAM_TIMEOUT, "time was over"),
    "floods": ("yes", StopReason.PROGRAM_FAILED, "it printed more than 100000 bytes"),
    "floods errors": ("yes >&2", StopReason.PROGRAM_FAILED, "it printed more than 100000 bytes"),
    "leaves children": ("setsid sleep 600 & sleep 600 & echo 1", StopReason.PROGRAM_DONE, None),
    "children hold the pipes": ("setsid sh -c 'sleep 600' & echo 1", StopReason.PROGRAM_DONE, None),
    "hides": ("env -i setsid sleep 60 & sleep 0.2; echo 1", StopReason.PROGRAM_DONE, None),
    "forks": ("f() { sleep 0.5; f & f; }; f & sleep 600", StopReason.PROGRAM_TIMEOUT, "time was over"),
    "leaks": (
        f"{sys.executable} -c 'x = []\nwhile True: x.append(bytes(10**7))' || exit 9",
        StopReason.PROGRAM_FAILED,
        "it ended with code 9",
    ),
}


class Zero:
    def score(self, trajectory):
        return 0.0


@pytest.mark.parametrize("name", BAD)
def test_a_bad_command_costs_its_rollout_alone_and_leaves_nothing(name, protocol, tmp_path, monkeypatch, caplog):
    script, reason, said = BAD[name]
    caplog.set_level("DEBUG", "rollout.programs.loop")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    alone = f'if [ "$TASK_ID" = bad ]; then {script}; else echo 1; fi'
    program = sh(alone, timeout_s=5.0, output_bytes=100_000, memory_mb=300)
    system = system_of(protocol, YES, program, Zero())
    tasks = [dataclasses.replace(TASK, id=name) for name in ("good", "bad", "fine")]
    try:
        good, bad, fine = system.rollout(tasks, sampling=SAMPLING, seed=1)
        assert good.stop_reason is fine.stop_reason is StopReason.PROGRAM_DONE
        assert bad.stop_reason is reason and (said is None or said in caplog.text)
        assert not marked(tmp_path) and not list(tmp_path.iterdir())
    finally:
        system.close()


def test_the_trainers_environment_is_not_passed_on(protocol, monkeypatch):
    monkeypatch.setenv("COMPACT_AGENTS_SECRET", "s" * 32)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    trajectory = play(system_of(protocol, YES, sh("env | sort | tr '\\n' ' '", environment={"OWN": "1"})))
    names = {part.partition("=")[0] for part in (trajectory.answer or "").split(" ") if "=" in part}
    assert "OWN" in names and "OPENAI_BASE_URL" in names and not names & {"COMPACT_AGENTS_SECRET", "HF_TOKEN"}


@pytest.mark.parametrize("question", ["a\0b", "half a pair \ud800", "x" * 200_000, "'; exit 3; '", "a\nb"])
def test_any_text_reaches_the_command(question, protocol):
    script = 'import json, os; t = json.load(open(os.environ["TASK_FILE"])); print(len(t["question"]))'
    task = dataclasses.replace(TASK, id=question[:50], question=question)
    trajectory = play(system_of(protocol, YES, CommandProgram(["python", "-c", script])), task)
    assert trajectory.reward is not None and trajectory.reward.total == len(question)


def test_a_command_that_cannot_start_is_an_infrastructure_failure(protocol, monkeypatch):
    async def refused(*arguments, **options):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr("asyncio.create_subprocess_exec", refused)
    system = system_of(protocol, YES, sh("echo 1"))
    assert play(system).stop_reason is StopReason.INFRASTRUCTURE and "temporarily" in system.failures[0]


def test_commands_run_a_few_at_a_time(protocol):
    program = sh("sleep 0.3; echo 1", at_once=1)
    system = system_of(protocol, YES, program)
    began = time.monotonic()
    try:
        system.rollout([dataclasses.replace(TASK, id=str(i)) for i in range(4)], sampling=SAMPLING, seed=1)
    finally:
        system.close()
    assert time.monotonic() - began >= 4 * 0.3


def test_an_isolated_command_leaves_nothing_even_if_it_hides(protocol):
    program = sh("env -i setsid sleep 611 & sleep 0.2; echo 1", isolated=True)
    try:
        trajectory = play(system_of(protocol, YES, program))
    except ValueError as error:
        assert "makes no PID namespace" in str(error)
        pytest.skip(str(error))
    assert trajectory.reward.total == 1.0
    found = [p for p in filter(str.isdigit, os.listdir("/proc")) if "sleep\x00611" in _command(p)]
    assert not found


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_what_cannot_run_is_refused_at_construction():
    with pytest.raises(ValueError, match="there is no program 'no-such-agent'"):
        CommandProgram(["no-such-agent"])
    with pytest.raises(ValueError, match="expected a list"):
        CommandProgram("python agent.py")  # type: ignore[arg-type]
