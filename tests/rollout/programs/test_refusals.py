"""What a program cannot be combined with is refused in a line, before a model loads; and what agent-check prints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonargparse import dict_to_namespace

from data_modules.evaluation_data import EvaluationData
from experiments.commands.agent_check import described
from experiments.commands.cli import main
from experiments.registry.errors import ExperimentError
from experiments.registry.project import ROOT
from experiments.stages.rollout_tools import check_rollouts
from rollout.programs.functions import PythonProgram
from rollout.protocols.hermes import HermesProtocol
from rollout.samplers.branching import BranchingSampler
from rollout.system import RolloutSystem
from tests.rollout.programs.playing import END, SEARCH, Own, Sampler, call, play, system_of, user
from tests.rollout.programs.test_conversations import message_of
from tests.rollout.serving import serving_apart

YES = lambda text, n: f"yes{END}"  # noqa: E731


async def done(task, model):
    return 1.0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"environment": object()}, "an environment and a program; give one"),
        ({"sampler": BranchingSampler(initial_rollouts=4)}, "BranchingSampler forks trajectories .* but a program"),
        ({"entropy_tokens": 5}, "rollouts has entropy_tokens, which a program does not take"),
        ({"limit_eos": True}, "rollouts has limit_eos"),
    ],
)
def test_a_system_refuses_what_a_program_cannot_do(options, message, protocol):
    with pytest.raises(ValueError, match=message):
        system_of(protocol, YES, done, **options)


def test_protocol_and_program_belong_together(protocol, folder):
    engine = Sampler(protocol, YES)
    with pytest.raises(ValueError, match="needs a ProgramProtocol as rollouts.protocol; found HermesProtocol"):
        RolloutSystem(engine, HermesProtocol(folder, tools=[]), program=Own(done))
    with pytest.raises(ValueError, match="rollouts has no program; give one, or an environment"):
        RolloutSystem(engine, protocol)


def test_data_modules_refuse_options_about_prompts(protocol):
    system = system_of(protocol, YES, done)
    for options in ({"diagnostic_prompts": ["closed_book"]}, {"max_eval_prompt_tokens": 10}):
        with pytest.raises(
            ValueError, match=f"data has {next(iter(options))}, but rollouts.program writes the prompts"
        ):
            EvaluationData(system, **options)
    assert system.first_prompts() is None and not system.needs_answers


@pytest.mark.parametrize(
    "function, message",
    [("no.such.module", "cannot be imported"), ("json.nothing", "cannot be imported"), ("os.getcwd", "does not take")],
)
def test_a_function_that_cannot_be_called_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        PythonProgram(function)


def parsed(**changes):
    given = {
        "engine": {"class_path": "rollout.engines.vllm_engine.VLLMEngine"},
        "protocol": {"class_path": "rollout.programs.protocol.ProgramProtocol", "init_args": {"tokenizer": "nowhere"}},
        "program": {
            "class_path": "rollout.programs.functions.PythonProgram",
            "init_args": {"function": "tests.rollout.programs.test_refusals.done"},
        },
    }
    rollouts = {"class_path": "rollout.system.RolloutSystem", "init_args": given | changes}
    return SimpleNamespace(config=dict_to_namespace({"data": {"init_args": {"rollouts": rollouts}}}))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"environment": {"class_path": "x.Y"}}, "an environment and a program"),
        ({"protocol": {"class_path": "rollout.protocols.hermes.HermesProtocol"}}, "needs a ProgramProtocol"),
        ({"sampler": {"class_path": "rollout.samplers.branching.BranchingSampler"}}, "but a program"),
        (
            {"program": {"class_path": "rollout.programs.functions.PythonProgram", "init_args": {"function": "a.b"}}},
            "a.b",
        ),
        (
            {"program": {"class_path": "rollout.programs.commands.CommandProgram", "init_args": {"command": ["nope"]}}},
            "there is no program 'nope'",
        ),
    ],
)
def test_the_dry_run_says_so(changes, message):
    if message is None:
        check_rollouts(parsed(**changes), "here")
    else:
        with pytest.raises(ExperimentError, match=message):
            check_rollouts(parsed(**changes), "here")


def test_agent_check_shows_rows_and_reasons(protocol):
    async def agent(task, model):
        said = message_of(await model.chat(messages=[user("a")], tools=[SEARCH], temperature=0))
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "25"}
        await model.chat(messages=[user("a"), said, result], tools=[SEARCH])
        await model.chat(messages=[user("b")])
        return {"reward": 0.5, "answer": "25", "metrics": {"calls": 1}}

    system = system_of(protocol, lambda text, n: call() if n == 0 else f"25{END}", agent)
    trajectory = play(system)
    text = "\n".join(described(system.agent_loop.reports[-1], trajectory, ()))
    rows = [line.split(None, 5) for line in text.splitlines() if re.match(r" +\d", line)]
    assert [row[:3] for row in rows] == [["1", "1", "1"], ["2", "1", "2"], ["3", "2", "1"]]
    assert [row[5] for row in rows] == [
        "rendered as a whole: the first request",
        "continues a turn: its ids, then the new messages",
        "rendered as a whole: no turn of the model in it",
    ]
    sampled = sum(trajectory.loss_mask)
    assert f"tokens, {sampled} of them sampled" in text and "3 requests, 2 rows: " in text
    assert "reward 0.5 (program 0.5, calls 1)" in text
    assert "the program asked for temperature 1 times" in text and "ended by program_done" in text


@pytest.fixture
def page_options(tmp_path, monkeypatch, model_dir) -> list[str]:
    """Options of the page's experiments, whose files are written to a folder of experiments."""
    page = (ROOT / "docs" / "own_agent.md").read_text()
    files = dict(re.findall(r"```\w+\n# (my_agent\w*\.\w+)\n(.*?)```", page, re.DOTALL))
    assert set(files) == {"my_agent.py", "my_agent.yaml", "my_agent_served.yaml"}
    for name, text in files.items():
        Path(tmp_path, name).write_text(text)
    (tmp_path / "q.jsonl").write_text(
        "".join(f'{{"question": "Say {n}.", "golden_answers": "{n}"}}\n' for n in range(40))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("COMPACT_AGENTS_EXPERIMENTS", str(tmp_path))
    monkeypatch.setenv("COMPACT_AGENTS_OUTPUTS", str(tmp_path / "outputs"))
    return [f"--paths.questions={tmp_path}/q.jsonl", f"--paths.model={model_dir}"]


def test_the_agent_on_the_page_is_valid(page_options, capsys):
    options = page_options
    assert main(["dry-run", "my_agent", *options]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "function: my_agent.solve" in said and "max_turns: 20" in said


@pytest.mark.slow
def test_the_pages_served_model_gets_a_row_of_results(page_options, tmp_path, capsys):
    def answer(body):
        [message] = body["messages"]
        number = int(re.findall(r"\d+", message["content"])[0])
        return {"choices": [{"message": {"role": "assistant", "content": str(number - number % 2)}}]}

    with serving_apart(answer) as served:
        given = [
            "--paths.served_model_name=big",
            f"--paths.server={served.url}/v1",
            "--values.tracker=none",
            *page_options,
        ]
        assert main(["train", "my_agent_served", *given]) == 0, capsys.readouterr()
    [evaluation] = (tmp_path / "outputs").glob("my_agent_served/*/evaluation.json")
    tested = [int(re.findall(r"\d+", body["messages"][0]["content"])[0]) for body in served.bodies]
    even = sum(number % 2 == 0 for number in tested) / len(tested)
    assert 0 < even < 1 and json.loads(evaluation.read_text())["test"]["em"]["mean"] == even
    with serving_apart(answer) as served:
        given[1] = f"--paths.server={served.url}/v1"
        assert main(["ask", "my_agent_served", "--question", "Say 8", *given]) == 0
    assert "answer: 8\n1 turn, no call" in capsys.readouterr().out
    assert main(["evaluate", "my_agent_served", *given]) == 2
    assert "is served elsewhere and has no folder" in capsys.readouterr().err
