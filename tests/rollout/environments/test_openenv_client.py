"""Environments of OpenEnv servers: a real server of the package, from ``.venv-openenv``."""

import asyncio

import pytest

from experiments.registry.project import ROOT
from rollout.environments.openenv_client import OpenEnv
from rollout.trajectory import Action, ActionKind, CallOutcome, InfrastructureError, Task, ToolRequest
from tests.rollout.environments.processes import children_named

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
SERVER = "experiments/worlds/adapters/openenv_server.py"
GUESS = {
    "command": [str(PYTHON), str(ROOT / SERVER), "{port}"],
    "action": {"number": "{action}"},
    "observation": "{observation[text]}",
}
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
    factory = OpenEnv(**GUESS, max_sessions=2)
    other = OpenEnv(**GUESS | {"action": {"guess": "{action}"}})

    async def run():
        await factory.start()
        played = await asyncio.gather(*(play(factory, seed, *"123456789") for seed in range(4)))
        wrong = await play(factory, 0, "many", "5")
        elsewhere = OpenEnv(url=factory.url, action={"guess": "{action}"}, observation="{observation[text]}")
        with pytest.raises(ValueError, match="takes metadata, number"):
            await elsewhere.start()
        with pytest.raises(ValueError, match="does not fit the observation"):
            await play(OpenEnv(url=factory.url, observation="{observation[hint]}"), 0)
        await elsewhere.close()
        await factory.close()
        return played, wrong

    played, (_, (many, five)) = asyncio.run(run())
    for first, steps in played:
        ends = [step.done for step in steps].index(True)
        texts = [step.results[0].text for step in steps[: ends + 1]]
        found = texts[-1] == "right"
        assert first.text == "guess a number" and set(texts[:-1]) == {"higher"} if ends else True
        assert steps[ends].measures == {"success": float(found), "episode_return": float(found)}
        assert all(step.results[0].outcome is CallOutcome.REFUSED for step in steps[ends + 1 :])
    assert {steps[3].measures["success"] for _, steps in played} == {0.0, 1.0}, "both ends occur"
    assert (
        many.results[0].outcome is CallOutcome.ERROR
        and "number: Input should be a valid integer" in many.results[0].text
    )
    assert not many.done and five.results[0].outcome is CallOutcome.OK
    assert not children_named("openenv_server.py")
    assert other.url is None


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
