"""Environments of verifiers: the real package in ``.venv-verifiers``, whose harness asks our endpoint."""

import asyncio
import re

import pytest

from data_modules.datasets.questions import load_tasks
from data_modules.datasets.verifiers_tasks import VerifiersTasks
from experiments.registry.project import ROOT
from rollout.programs.verifiers_program import INDEX, VerifiersProgram
from rollout.trajectory import StopReason, Task
from tests.rollout.environments.processes import children_named
from tests.rollout.programs.playing import END, SAMPLING, Sampler, system_of

PYTHON = str(ROOT / ".venv-verifiers" / "bin" / "python")
FOLDERS = [str(ROOT / "experiments" / "worlds" / "adapters" / "tasksets")]
WORDS = {"taskset": {"id": "compact_words"}, "folders": FOLDERS, "python": PYTHON}
needs_verifiers = pytest.mark.skipif(
    not (ROOT / ".venv-verifiers").exists(), reason="no .venv-verifiers here (make environments)"
)


@pytest.mark.slow
@needs_verifiers
def test_its_harness_plays_rollouts_through_the_endpoint(protocol, tmp_path, caplog):
    assert VerifiersTasks(**WORDS, train=3, val=1, test=2).run(tmp_path) == {"train": 3, "val": 1, "test": 2}
    splits = {name: load_tasks(tmp_path / f"{name}.parquet", answers=False) for name in ("test", "val", "train")}
    assert [task.metadata[INDEX] for tasks in splits.values() for task in tasks] == list(range(6))
    first, second, third = splits["train"]

    def say(text, number):
        word = re.findall(r"nus\): (\w+)", text)[-1]
        if word == second.question.rpartition(" ")[2]:
            return f"no idea{END}"
        return f"\\boxed{{{word[::-1]}}}{END}"

    other = Task(third.id, "Spell this word backward (example: sun -> nus): zzz", (), "d", metadata=third.metadata)
    unknown = Task("u", "q", (), "d")
    engine = Sampler(protocol, say)
    system = system_of(protocol, engine, VerifiersProgram(**WORDS, failure_reward=0.0))
    try:
        found = system.rollout([first, second, other, unknown], sampling=SAMPLING, seed=1)
    finally:
        system.close()
    right, wrong, changed, foreign = found
    assert right.stop_reason is StopReason.PROGRAM_DONE and right.reward.total == 1.0
    assert right.reward.parts["letters"] == 1.0 and right.answer.startswith("\\boxed{")
    assert right.response_ids == dict(engine.sampled)[right.prompt_ids], "the sampled ids, never encoded again"
    assert first.question in protocol.decode(right.prompt_ids)
    assert wrong.reward.total == 0.0 and wrong.stop_reason is StopReason.PROGRAM_DONE
    assert changed.stop_reason is foreign.stop_reason is StopReason.INFRASTRUCTURE, "the model has done nothing wrong"
    assert "run the stage of VerifiersTasks again" in caplog.text and "u has no metadata.verifiers_index" in caplog.text
    assert not children_named("verifiers_worker.py")


@pytest.mark.slow
@needs_verifiers
def test_a_taskset_that_cannot_be_loaded_or_is_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the taskset has 1000 tasks; expected 1250"):
        VerifiersTasks(**WORDS).run(tmp_path)
    program = VerifiersProgram(taskset={"id": "no_such_taskset"}, python=PYTHON)
    with pytest.raises(ValueError, match="taskset 'no_such_taskset' not found"):
        asyncio.run(program.start())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"taskset": {}}, r"expected its id"),
        ({"taskset": {"id": "a"}, "python": "no/python"}, "there is no no/python; make it by `make environments`"),
    ],
)
def test_wrong_options_are_refused(options, message):
    for made in (VerifiersProgram, VerifiersTasks):
        with pytest.raises(ValueError, match=message):
            made(**options)
