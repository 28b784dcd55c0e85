"""Environments of OpenEnv servers: a real server of the package, from ``.venv-openenv``."""

import asyncio

import pytest

from experiments.registry.project import ROOT
from rollout.environments.openenv_client import OpenEnv
from rollout.trajectory import Action, ActionKind, CallOutcome, InfrastructureError, Task, ToolRequest
from tests.rollout.environments.processes import children_named

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
SERVER = "experiments/worlds/adapters/openenv_server.py"
LIGHTS = {
    "command": [str(PYTHON), str(ROOT / SERVER), "{port}"],
    "action": {"word": "{action}"},
    "observation": "{observation[colour]}",
}
RIGHT = {"red": "stop", "yellow": "slow", "green": "go"}
needs_openenv = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-openenv here (make environments)")


def task(number, **options):
    return Task(f"t{number}", "q", (), "d", metadata={"seed": number} | ({"options": options} if options else {}))


async def play(factory, number, *words):
    environment = factory(task(number))
    try:
        first = await environment.reset()
        return first, [
            await environment.step(Action(ActionKind.CALL, (ToolRequest("act", {"action": word}),))) for word in words
        ]
    finally:
        await environment.close()


@pytest.mark.slow
@needs_openenv
def test_episodes_on_a_real_server():
    factory = OpenEnv(**LIGHTS, max_sessions=2)

    async def run():
        await factory.start()
        played = await asyncio.gather(*(play(factory, seed, "stop", "go", "slow", "Stop!", "go") for seed in range(4)))
        elsewhere = OpenEnv(url=factory.url, action={"number": "{action}"}, observation="{observation[colour]}")
        with pytest.raises(ValueError, match=r"has the fields number, but .* takes metadata, word \(needed: word\)"):
            await elsewhere.start()
        await elsewhere.close()
        other = OpenEnv(url=factory.url, action={"word": "{action}"}, observation="{observation[hint]}")
        with pytest.raises(ValueError, match="does not fit the observation"):
            await play(other, 0)
        await other.close()
        await factory.close()
        return played

    played = asyncio.run(run())
    for first, (stop, go, slow, wrong, last) in played:
        assert wrong.results[0].outcome is CallOutcome.ERROR and "word: Input should be 'stop'" in wrong.results[0].text
        assert not wrong.done and wrong.reward == 0.0 and last.done
        shown = [first.text, *(step.results[0].text for step in (stop, go, slow))]
        rewards = [step.reward for step in (stop, go, slow, last)]
        assert rewards == [
            0.25 * (RIGHT[colour] == word) for colour, word in zip(shown, ("stop", "go", "slow", "go"), strict=True)
        ]
        assert last.measures["episode_return"] == sum(rewards)
    assert len({first.text for first, _ in played}) > 1, "seeds reach the server"
    assert not children_named("openenv_server.py")


@pytest.mark.parametrize(
    "command, message",
    [
        (["python", "-c", "raise SystemExit('no module')", "{port}"], "ended with code 1; it printed: no module"),
        (["sleep", "{port}"], "did not answer /health within 0.3 s"),
    ],
)
def test_a_server_that_does_not_start_says_why_and_is_ended(command, message):
    factory = OpenEnv(command=command, start_timeout_s=0.3 if command[0] == "sleep" else 60.0)
    with pytest.raises(ValueError, match=message):
        asyncio.run(factory.start())
    assert not children_named("sleep")


def test_a_server_that_is_gone_is_infrastructure():
    async def run():
        factory = OpenEnv(url="http://127.0.0.1:9")
        try:
            with pytest.raises(InfrastructureError, match="OpenEnv server http://127.0.0.1:9"):
                await play(factory, 0)
        finally:
            await factory.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "expected one of them"),
        ({"url": "http://a", "command": ["b", "{port}"]}, "expected one of them"),
        ({"command": ["server"]}, "has no {port}"),
        ({"url": "http://a", "action": {"number": 1}}, "expected {action}"),
        ({"url": "http://a", "api_key_variable": "NO_SUCH_KEY"}, "needs a key"),
    ],
)
def test_wrong_options_are_refused(options, message, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        OpenEnv(**options)


def test_words_go_where_the_action_says():
    factory = OpenEnv(url="http://a", action={"tool": "say", "arguments": {"text": "{action}!"}, "n": [1, "{action}"]})
    assert factory.fill("go") == {"tool": "say", "arguments": {"text": "go!"}, "n": [1, "go"]}
