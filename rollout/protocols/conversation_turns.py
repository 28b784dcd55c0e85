"""Splits a conversation into a rollout's turns: the texts that the model would have sampled and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.protocols.chat_boundaries import ChatBoundaries, Message


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One assistant turn of a conversation, and the messages up to the next assistant turn."""

    text: str  # without its end
    observed: tuple[Message, ...]
    called: tuple[str, ...]  # names of the tools


def conversation_turns(chat: ChatBoundaries, messages: Sequence[Message]) -> tuple[list[AssistantTurn], bool]:
    """Split a conversation into its assistant turns. Returns them, and whether the chat template rewrites history.

    The conversation is rendered once and cut behind the header of each turn and at its end. The text between must be a
    rollout's, and the turns must be complete. Otherwise the template renders earlier turns differently once others
    follow: Qwen3 drops the thinking of all but the latest question, and the header of a turn without thinking. Then
    every turn is taken from a rendering in which it is the last.

    Differences of growing renderings without this check lose text (verl #3477): where the two disagree, the tool's
    message silently loses as many characters as the empty thinking has.

    Args:
        messages: begin with the prompt; only tools' contents may quote control tokens.

    Raises:
        ValueError: a turn does not begin with its header even when it is the last.
    """
    hidden = chat.hide([message for message in messages if message["role"] == "tool"])
    results = iter(hidden)
    shown = [next(results) if message["role"] == "tool" else message for message in messages]
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    between = list(zip(positions, [*positions[1:], len(messages)], strict=True))
    called = [_called(messages[position]) for position in positions]
    follows = [
        chat.text_after(shown[position + 1 : end], called=call)
        for (position, end), call in zip(between[:-1], called[:-1], strict=True)
    ]
    whole = chat.render(shown, open_turn=False)
    texts = _cut(whole, chat.render(shown[: positions[0]]), follows, chat.end)

    def missing(texts: Sequence[str]) -> list[int]:
        return [parts_left_out(messages[position], text) for position, text in zip(positions, texts, strict=True)]

    rewritten = False
    if texts is None or any(missing(texts)):
        latest = [_last_turn(chat, shown[: position + 1]) for position in positions]
        if texts is None or missing(latest) != missing(texts):
            texts, rewritten = latest, True
    return [
        AssistantTurn(text, tuple(messages[position + 1 : end]), call)
        for text, (position, end), call in zip(texts, between, called, strict=True)
    ], rewritten


def parts_left_out(message: Message, text: str) -> int:
    """Return how many parts of an assistant's message (thinking, content) are missing in the text of its turn."""
    thinking, _, content = message["content"].rpartition("</think>")
    parts = (message.get("reasoning_content", ""), thinking.replace("<think>", ""), content)
    return sum(part.strip() not in text for part in parts)


def _called(message: Message) -> tuple[str, ...]:
    return tuple(call.get("function", call)["name"] for call in message.get("tool_calls") or ())


def _cut(whole: str, prompt: str, follows: Sequence[str], end: str) -> list[str] | None:
    """Cut the rendered conversation ``whole`` into the texts of its assistant turns. Each turn is behind ``prompt`` or
    an entry of ``follows``, and ends with ``end``. Returns None if ``whole`` has other parts."""
    texts = []
    position = 0
    for given in (prompt, *follows):
        if not whole.startswith(given, position):
            return None
        start = position + len(given)
        stop = whole.find(end, start)
        if stop < 0:
            return None
        texts.append(whole[start:stop])
        position = stop + len(end)
    return texts if not whole[position:].strip() else None


def _last_turn(chat: ChatBoundaries, messages: Sequence[Message]) -> str:
    before, whole = chat.render(messages[:-1]), chat.render(messages, open_turn=False)
    texts = _cut(whole, before, (), chat.end)
    if texts is None:
        raise ValueError("the template does not begin an assistant's turn with the header it opens one with")
    return texts[0]
