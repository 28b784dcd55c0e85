"""The chat client against local servers: what is sent, what is tried again, what is told."""

import asyncio
import time

import pytest

from rollout.services.chat_client import ChatClient
from rollout.trajectory import InfrastructureError, PermanentFailure
from tests.processes import with_patience
from tests.rollout.serving import free_port, raw_server, serving

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "half \ud83d pair é"}]


def reply(text):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


async def ask(urls, *, times=1, **options):
    client = ChatClient(urls, "m", **({"backoff": 0.001} | options))
    try:
        return [await client.complete(MESSAGES, temperature=0.6, top_p=0.95, max_tokens=7) for _ in range(times)]
    finally:
        await client.close()


def asking(answers, **options):
    """The replies (or the error) and what the server was asked."""

    async def main():
        async with serving(answers) as served:
            try:
                return await ask([served.url + "/v1"], **options), served
            except InfrastructureError as error:
                return error, served

    return asyncio.run(main())


def test_what_is_sent(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    replies, served = asking([reply("hello")], api_key_variable="JUDGE_KEY", extra=extra)
    assert replies == ["hello"]
    [body], [headers] = served.bodies, served.headers
    expected = {"model": "m", "temperature": 0.6, "top_p": 0.95, "max_tokens": 7, **extra}
    sent = [MESSAGES[0], {"role": "user", "content": "half ? pair é"}]
    assert body == expected | {"messages": sent} and headers["Authorization"] == "Bearer k3y"
    _, served = asking([reply("hello")])
    assert "Authorization" not in served.headers[0]


def test_a_key_that_is_a_word_is_left_in_replies_and_cut_out_of_messages(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "EMPTY")  # what vLLM's users send
    assert asking([reply("an EMPTY room")], api_key_variable="JUDGE_KEY")[0] == ["an EMPTY room"]
    error, _ = asking([(401, "no such key: EMPTY")], api_key_variable="JUDGE_KEY")
    assert str(error).endswith("status 401: no such key: ***")


@pytest.mark.parametrize("url", ["/v1", "/v1/", "/v1/chat/completions"])
def test_addresses(url):
    assert ChatClient(["http://a" + url], "m").urls == ["http://a/v1/chat/completions"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_tried_again(status):
    replies, served = asking([(status, "busy"), (status, "busy"), reply("x")], retries=2)
    assert replies == ["x"] and len(served.bodies) == 3
    error, served = asking([(status, "busy")], retries=2)
    assert f"no reply from m after 3 attempt(s): {served.url}/v1/chat/completions: status {status}: busy" == str(error)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, "too long"), "after 1 attempt.*status 400: too long"),
        ((404, "no model m"), "status 404"),
        ("<html>", "expected .*choices.*found <html>"),
        (reply(None), "expected"),
    ],
)
def test_not_tried_again(answer, message):
    error, served = asking([answer, reply("x")], retries=3)
    assert len(served.bodies) == 1
    assert isinstance(error, PermanentFailure) == isinstance(answer, tuple)
    with pytest.raises(InfrastructureError, match=message):
        raise error


def test_servers_that_are_down_break_off_or_are_slow():
    async def never(body):
        await asyncio.Event().wait()

    async def main(seconds):
        down = f"http://127.0.0.1:{free_port()}/v1"
        with pytest.raises(InfrastructureError, match=r"after 2 attempt\(s\): .*Connect"):
            await ask([down], retries=1)
        async with raw_server(b"") as broken, serving(never) as slow, serving([reply("x")]) as good:
            assert await ask([down, broken, good.url], times=2, retries=2) == ["x"] * 2
            with pytest.raises(InfrastructureError, match="no answer within 0.1 s"):
                await ask([slow.url], retries=0, timeout=0.1)
            assert await ask([slow.url, good.url], retries=1, timeout=seconds) == ["x"]

    with_patience(lambda seconds: asyncio.run(main(seconds)), 1.0, 20.0, 120.0)


def test_servers_share_the_work():
    async def main():
        async with serving([reply("x")]) as first, serving([reply("x")]) as second:
            await ask([first.url, second.url], times=6)
            return len(first.bodies), len(second.bodies)

    assert asyncio.run(main()) == (3, 3)


def test_a_server_may_ask_for_a_longer_pause():
    began = time.monotonic()
    replies, _ = asking([(429, "", {"Retry-After": "1"}), reply("x")])
    assert replies == ["x"] and time.monotonic() - began >= 1
    date = {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
    assert asking([(429, "", date), reply("x")])[0] == ["x"]


def test_concurrency_is_limited_and_waiting_is_not_held_against_the_server():
    async def main(seconds):
        async def work(body):
            await asyncio.sleep(seconds / 5)
            return reply("x")

        async with serving(work) as served:
            client = ChatClient([served.url], "m", concurrency=2, timeout=seconds, retries=0)
            asked = (client.complete(MESSAGES, temperature=0, max_tokens=1) for _ in range(12))
            assert await asyncio.gather(*asked) == ["x"] * 12  # longer than the deadline in all
            await client.close()
            assert served.most == 2

    with_patience(lambda seconds: asyncio.run(main(seconds)), 1.0, 10.0, 60.0)


def test_one_loop_after_another_but_not_two_at_once():
    async def main():
        async with serving([reply("x")]) as served:
            client = ChatClient([served.url], "m")

            def ask_once():
                return client.complete(MESSAGES, temperature=0, max_tokens=1)

            await ask_once()
            with pytest.raises(RuntimeError, match="ChatClient serves one event loop at a time"):
                await asyncio.to_thread(lambda: asyncio.run(ask_once()))
            await client.close()
            assert await asyncio.to_thread(lambda: asyncio.run(ask_once())) == "x"

    asyncio.run(main())


@pytest.mark.parametrize("urls", [[], ["localhost"]])
def test_wrong_addresses_are_refused(urls):
    with pytest.raises(ValueError, match="expected"):
        ChatClient(urls, "m")


def test_fields_and_keys_that_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="extra holds .'max_tokens', 'model'."):
        ChatClient(["http://a"], "m", extra={"model": "x", "max_tokens": 3, "seed": 1})
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="the chat endpoint of m needs a key: set the environment variable JUDGE_KEY"):
        ChatClient(["http://a"], "m", api_key_variable="JUDGE_KEY")


def test_half_a_surrogate_pair_in_a_reply_becomes_u_fffd():
    assert asking([reply("half \ud83d pair")])[0] == ["half \ufffd pair"]
