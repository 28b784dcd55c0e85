"""docs/own_engine.md is executed: its engine in a child process, in whole rollouts, and by class path in the YAML."""

import asyncio
import re
import shlex
import sys

import pytest
import torch

from experiments.registry.overrides import parse
from experiments.registry.project import ROOT, Project
from experiments.stages.graph import Graph
from experiments.stages.validate import check
from rollout.engines.base import SamplingParams
from rollout.environments.question_answering import QuestionAnswering
from rollout.protocols.search_r1 import SearchR1Protocol
from rollout.system import RolloutSystem
from rollout.tools.search import SearchTool
from rollout.trajectory import Task
from tests.rollout.engines.conftest import LOGPROB_TOLERANCE, generate, random_prompts
from tests.rollout.engines.pushing import push_weights
from tests.rollout.scripted import ToyRetriever

PAGE = (ROOT / "docs" / "own_engine.md").read_text()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The files of the page in a folder outside the repository."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield folder
    sys.modules.pop("my_engine", None)


@pytest.fixture(scope="module")
def engine(own, model_dir):
    from my_engine import MyEngine

    engine = MyEngine(str(model_dir), max_length=512)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def system(engine, model_dir):
    protocol = SearchR1Protocol(str(model_dir))
    world = QuestionAnswering({"search": SearchTool(ToyRetriever())})
    system = RolloutSystem(engine, protocol, world, max_turns=2, max_turn_tokens=12, max_observation_tokens=40)
    yield system


def test_ids_and_logprobs_are_those_of_transformers(engine, reference):
    prompts = random_prompts(3)
    for prompt, found in zip(prompts, generate(engine, prompts, SamplingParams(8, temperature=0.0)), strict=True):
        assert list(found.token_ids) == reference.greedy(prompt, 8) and found.finish_reason == "length"
        assert reference.largest_gap(prompt, found) < LOGPROB_TOLERANCE
    sampled = SamplingParams(8, temperature=0.7, top_p=0.8, top_k=20, seed=3)
    first, second = generate(engine, [prompts[0]] * 2, sampled)
    assert first.token_ids == second.token_ids
    assert reference.largest_gap(prompts[0], first, 0.7) < LOGPROB_TOLERANCE


def test_a_generation_ends_at_a_stop_token_or_string(engine, reference, protocol):
    prompt = random_prompts(1)[0]
    ids = reference.greedy(prompt, 8)
    third = next(k for k in range(2, 8) if ids[k] not in ids[:k])
    (found,) = generate(engine, [prompt], SamplingParams(8, temperature=0.0, stop_token_ids=(ids[third],)))
    assert (list(found.token_ids), found.finish_reason) == (ids[: third + 1], "eos")
    texts = [protocol.tokenizer.decode(ids[: k + 1]) for k in range(8)]
    text = next(t for k in range(2, 8) if (t := texts[k][len(texts[k - 1]) :]).isascii() and t and t not in texts[1])
    (found,) = generate(engine, [prompt], SamplingParams(8, temperature=0.0, stop=(text,)))
    last = next(k for k in range(8) if text in texts[k])
    assert (list(found.token_ids), found.stop_string) == (ids[: last + 1], text) and found.finish_reason == "stop"
    with pytest.raises(ValueError, match="refuses this request: MyBackend has no top_logprobs"):
        generate(engine, [prompt], SamplingParams(8, top_logprobs=2))


def test_a_cancelled_request_leaves_the_queue(engine):
    prompts, long = random_prompts(2), SamplingParams(200, temperature=0.0)

    async def cancel():
        waiting = [asyncio.ensure_future(engine.generate(prompts[0], long)) for _ in range(20)]
        await asyncio.sleep(0)
        for request in waiting:
            request.cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(found, asyncio.CancelledError) for found in asyncio.run(cancel()))
    assert generate(engine, [prompts[1]], SamplingParams(2))


def test_rollouts_before_and_after_a_weight_push(engine, system, reference, other_reference):
    tasks = [Task(f"q{i}", f"Where was Mira Voss number {i} born?", ("Grey Harbor",), "toy") for i in range(2)]
    for version, truth in ((0, reference), (1, other_reference)):
        if version:
            asyncio.run(push_weights(engine, truth.weights(), version, checksum=True))
        found = system.rollout(tasks, n=2, sampling=SamplingParams(12), seed=version)
        assert [(t.group, t.index) for t in found] == [("q0", 0), ("q0", 1), ("q1", 0), ("q1", 1)]
        for trajectory in found:
            first = trajectory.turns[0]
            assert first.policy_version == version
            new = trajectory.response_ids[: first.end]
            expected = truth.logprobs(list(trajectory.prompt_ids), new).gather(1, torch.tensor(new)[:, None])[:, 0]
            assert trajectory.logprobs[: first.end] == pytest.approx(expected.tolist(), abs=LOGPROB_TOLERANCE)
    with pytest.raises(ValueError, match="do not fit the engine's model: .* missing"):
        asyncio.run(push_weights(engine, list(reference.weights())[:3], 2))


def test_the_yaml_names_it(own, tmp_path):
    (command,) = re.findall(r"^make dry-run .*", PAGE, re.MULTILINE)
    _, _, experiment, arguments = shlex.split(command)
    project = Project(experiment_dirs=(own, ROOT / "experiments/configs"), outputs=tmp_path / "out")
    words = shlex.split(arguments.removeprefix("ARGS="))
    stage = Graph(project, experiment.removeprefix("EXP="), parse(words), None).target()
    check(stage, ROOT)
    engine = stage.config["data"]["init_args"]["rollouts"]["init_args"]["engine"]
    assert engine == {"class_path": "my_engine.MyEngine", "init_args": {"model": "Qwen/Qwen3-0.6B", "max_length": 2048}}
