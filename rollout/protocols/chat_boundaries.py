"""Exact tokens between two sampled turns, as a model's chat template writes them.

A template renders whole conversations; a rollout needs its text *after* a sampled end of turn: for Qwen the line break
behind ``<|im_end|>`` (verl #6501 left it out), the tool messages, the header of the next turn. So a conversation of
placeholders is rendered and cut behind the end of its assistant's turn. Changes of earlier turns by the template
(dropped thinking, rewritten calls) are before the cut, so they do not matter.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from rollout.protocols.call_formats import thinking_tags
from rollout.protocols.text_protocol import check_thinking, control_tokens
from rollout.tokenizer import Quotes, decode, encode, render_chat
from rollout.trajectory import ToolRequest

Message = dict[str, Any]

_TURN = "placeholder of the assistant's turn"
_USER = {"role": "user", "content": "question"}


class ChatBoundaries:
    """Renders conversations with one chat template and one list of tools, and finds where each message ends.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        stop_token_ids: ids of the ends of a turn; the template's end must be one of them.
        tools: schemas for the template; empty for no tools.
        thinking: passed to the template as ``enable_thinking``; by default the template decides.
        newline: false: without the line break that the template writes behind an end of turn (verl #6501).

    Raises:
        ValueError: no chat template; a template that cannot render tool messages, does not end the assistant's turn
            with one of ``stop_token_ids``, or writes text after a turn that depends on earlier turns; ``thinking`` for
            a template without such a choice.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        tools: Sequence[Message] = (),
        thinking: bool | None = None,
        newline: bool = True,
    ) -> None:
        self.tokenizer, self.tools, self.newline = tokenizer, list(tools), newline
        self.options = {} if thinking is None else {"enable_thinking": thinking}
        self.where = f"the chat template of {tokenizer.name_or_path!r}"
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer in {tokenizer.name_or_path!r} has no chat template; tool calls need one (a base model "
                "without one can use the protocols search_r1 and arpo_tags)"
            )
        special = sorted(control_tokens(tokenizer), key=len, reverse=True)
        self._special = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
        self._any_special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.quotes = Quotes(tokenizer)
        listed = set(stop_token_ids)
        self.ends = tuple(token for token, token_id in self._special.items() if token_id in listed)
        self._end = re.compile("|".join(map(re.escape, self.ends)) or "(?!)")
        self.thinking_tags = thinking_tags(tokenizer.chat_template, tokenizer.get_vocab())
        self.arguments_as_text = False  # some templates want JSON text for the arguments of a call
        self._plain = {"role": "assistant", "content": _TURN}
        self.answer_role = "tool"  # of the message that answers a turn without a call
        self.writes_calls = self._writes_calls()
        self._choose_answer()
        ends = self._checked()
        self.end, self.call_end = ends[False], ends.get(True, ends[False])  # the template's own, by the kind of turn
        self.end_id: int = self._special[self.end]
        self.header = self.render([_USER])
        opening = self.thinking_tags[0]
        self.opened = opening if self.header.rstrip().endswith(opening) else ""  # thinking begins in the prompt
        check_thinking(tokenizer, thinking, bool(self.opened))

    def without_end(self, text: str) -> tuple[str, bool]:
        """Return a sampled turn's text without the token that ends it, and whether there was one."""
        end = next((end for end in self.ends if text.endswith(end)), None)
        return text.removesuffix(end or ""), end is not None

    def render(
        self, messages: Sequence[Message], *, tools: bool | Sequence[Message] = True, open_turn: bool = True
    ) -> str:
        """Return messages as the text that the chat template writes.

        Args:
            messages: messages in OpenAI's form; the arguments of calls are objects.
            tools: the chat's tools, no tools, or these schemas.
            open_turn: with the header of the assistant's next turn.

        Raises:
            ValueError: the template refuses the messages.
        """
        shown = self.tools if tools is True else tools or []
        return render_chat(
            self.tokenizer,
            self._adapted(messages),
            tools=list(shown) or None,
            add_generation_prompt=open_turn,
            **self.options,
        )

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text that the chat template rendered. Control tokens in the text become their
        ids."""
        return encode(self.tokenizer, text)

    def ids_after(self, messages: Sequence[Message], *, called: Sequence[str] = (), ended: bool = True) -> list[int]:
        """Return the token ids between an assistant's turn and its next one: ``messages``, then the header.

        Args:
            messages: messages of the tools or the user; see ``hide`` for quoted tags in their contents.
            called: names of the tools that the turn before has called.
            ended: the turn before has its end; else the ids begin with it.
        """
        written = self.quotes.ids(self.text_after(self.hide(messages), called=called))
        return written if ended else [self.end_id, *written]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt that ends with the header of the assistant's turn; see ``hide`` for quoted
        tags."""
        return self.quotes.ids(self.render(self.hide(messages)))

    def text_after(
        self, messages: Sequence[Message], *, called: Sequence[str] = (), turns: Sequence[Message] = ()
    ) -> str:
        """Return the text of ``messages`` that the template writes behind an assistant's turn. ``turns``: the turns
        before it."""
        turn = self._calling(called) if called else self._plain
        if not called and self.answer_role == "user":
            messages = [message | {"role": "user"} for message in messages]
        rendered = self.render([*(turns or [_USER]), turn, *messages])
        return self._behind_turn(rendered, bool(called))[1]

    def written_call(self, calls: Sequence[ToolRequest], tools: Sequence[Message]) -> str:
        """Return the text of a turn with these tool calls, as a model would sample it: behind the header and without
        its end. Raises ValueError if the template refuses the calls."""
        header = self.ids(self.render([_USER], tools=tools))
        whole = self.ids(self.render([_USER, self.message(calls)], tools=tools, open_turn=False))
        shared = len(os.path.commonprefix([header, whole]))  # a template may open thinking that it drops from history
        opened = self.opened if shared == len(header) else ""
        return opened + self._end.split(decode(self.tokenizer, whole[shared:]), maxsplit=1)[0]

    def turn_ids(self, content: str, thinking: str | None = None, calls: Sequence[ToolRequest] = ()) -> list[int]:
        """Return the token ids of an assistant's turn behind the header, with its end, for texts whose tokens are not
        known. They are as the template writes the turn: some leave out the thinking, or the text beside a call. Control
        tokens in the texts are quoted.

        Raises ValueError if the template refuses the turn."""
        quote = self.quotes.quote_special
        turn = self.message(calls, self.quotes.quote) if calls else {"role": "assistant"}
        turn |= {"content": quote(content)} | ({"reasoning_content": quote(thinking)} if thinking else {})
        rendered = self.render([_USER, turn], open_turn=False)
        written = self._behind_header(rendered, quote(thinking or ""))
        end = self._end.search(written)  # GLM ends a turn with the header of the next message, which is not there yet
        text = written[: end.start()] if end else written
        return [*self.quotes.ids(text), self._special[end[0] if end else self.call_end if calls else self.end]]

    def _behind_header(self, rendered: str, thinking: str) -> str:
        """Return the text that follows the header in a rendered turn. The header and the turn may differ in thinking
        that the header opens, or opens and closes."""
        if rendered.startswith(self.header):
            return rendered.removeprefix(self.header)
        opening, closing = self.thinking_tags
        plain = self.header.rpartition(opening)[0] if closing and opening in self.header else self.header
        shared = len(os.path.commonprefix([plain, rendered]))
        _, thought, body = rendered[shared:].partition(closing) if closing else ("", "", "")
        body = body.lstrip("\n") if thought else rendered[shared:]
        return f"{thinking}\n{closing}\n\n{body}" if self.opened else body

    def takes_results(self, called: Sequence[str], count: int) -> bool:
        """Return whether the chat template shows ``count`` tool messages after a turn that calls the tools named in
        ``called``."""
        texts = [f"result {index}" for index in range(count)]
        try:
            text = self.text_after([{"role": "tool", "content": content} for content in texts], called=called)
        except ValueError:
            return False
        return all(content in text for content in texts)

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with control tokens quoted (``Quotes``), so that they become ordinary text. Contents of
        tools are untrusted, so all their tags are quoted. Of other contents only control tokens are quoted, because a
        prompt may ask for ``<think>``; quote untrusted text in them before."""
        quote = {"tool": self.quotes.quote}
        return [{**m, "content": quote.get(m["role"], self.quotes.quote_special)(m["content"])} for m in messages]

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in the form that this chat template takes, with ids and names for calls and results."""
        adapted: list[Message] = []
        names: list[tuple[str, str]] = []  # of the latest calls: id and name
        for message in messages:
            if message.get("tool_calls"):
                functions = [call.get("function", call) for call in message["tool_calls"]]
                names = [(f"{index:09d}", function["name"]) for index, function in enumerate(functions)]
                calls = [
                    {"id": number, "type": "function", "function": self._function(function)}
                    for (number, _), function in zip(names, functions, strict=True)
                ]
                message = message | {"tool_calls": calls}
            elif message["role"] == "tool" and names:
                number, name = names.pop(0) if len(names) > 1 else names[0]
                message = message | {"tool_call_id": number, "name": name}
            adapted.append(message)
        return adapted

    def _function(self, function: Message) -> Message:
        arguments = function["arguments"]
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {"name": function["name"], "arguments": arguments}

    def message(self, calls: Sequence[ToolRequest], quote: Callable[[str], str] = str) -> Message:
        """Return an assistant's chat message with the tool ``calls``. ``quote`` is applied to arguments that are
        texts."""
        written = [
            {"type": "function", "function": {"name": call.name, "arguments": _mapped(call.arguments, quote)}}
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": written}

    def _calling(self, names: Sequence[str]) -> Message:
        return self.message([ToolRequest(name, {"argument": _TURN}) for name in names])

    def _tool_name(self) -> str:
        return self.tools[0]["function"]["name"] if self.tools else "tool"

    def _writes_calls(self) -> bool:
        """Return whether the chat template writes tool calls and results. Sets the form of arguments that it takes."""
        calling = [_USER, self._calling([self._tool_name()])]
        for self.arguments_as_text in (False, True):
            if self._shows(_TURN, calling, open_turn=False):
                return self._shows("the result", [*calling, {"role": "tool", "content": "the result"}])
        self.arguments_as_text = False
        return False

    def _shows(self, text: str, messages: Sequence[Message], open_turn: bool = True) -> bool:
        try:
            return text in self.render(messages, open_turn=open_turn)
        except ValueError:
            return False

    def _behind_turn(self, rendered: str, called: bool = False) -> tuple[str, str]:
        """Return the token that ends the placeholder's turn in a rendered text, and the text behind it. Raises
        ValueError."""
        _, found, rest = rendered.rpartition(_TURN)
        end = self._end.search(rest)
        other = None if called else self._any_special.search(rest[: end.start()] if end else rest)
        if found and other and not rest[: other.start()].strip() and self._stops_when_last():
            end = other  # harmony: <|return|> where the turn is the last, <|end|> once others follow
        if not found or end is None:
            raise ValueError(f"{self.where} shows no end of the assistant's turn that is a stop token")
        return end[0], rest[end.end() :].removeprefix("" if self.newline else "\n")

    def _stops_when_last(self) -> bool:
        _, _, rest = self.render([_USER, self._plain], open_turn=False).rpartition(_TURN)
        end = self._end.search(rest)
        return end is not None and not rest[: end.start()].strip()

    def _choose_answer(self) -> None:
        """Choose the role, tool or user, of the message that answers a turn without a call. If the end of a turn is the
        beginning of the next one (GLM), a model that calls nothing has begun the user's turn."""
        ends = []
        before = self._plain | {"content": "before"}
        for self.answer_role in ("user", "tool"):
            answer = {"role": self.answer_role, "content": "result"}
            try:
                end, after = self._behind_turn(self.render([_USER, before, answer, self._plain, answer]))
                ends.append(end if "result" in after else "")
            except ValueError:
                ends.append("")
        if ends[0] != ends[1] or not ends[0]:
            self.answer_role = "user"

    def _checked(self) -> dict[bool, str]:
        """Test the chat template and return the token that ends a turn, as {whether the turn has a call: token}. Raises
        ValueError if turns cannot be cut exactly out of the rendered text."""
        quote = f"[{next(iter(self._special))}]"
        ends: dict[bool, str] = {}
        for called in ((), (self._tool_name(),)):
            if called and not self.writes_calls:
                break
            count = 2 if self.takes_results(called, 2) else 1
            results = [{"role": "tool", "content": content} for content in ("one", "two.")[:count]]
            try:
                text = self.text_after(results, called=called)
            except ValueError as error:
                stops = ", ".join(self.ends) or "none"
                raise ValueError(
                    f"{self.where} cannot be used: {error}; expected one that renders user and assistant, and ends the "
                    f"assistant's turn with a stop token ({stops}); see eos_token and generation_config.json"
                ) from error
            turn = self._calling(called) if called else self._plain
            before = json.loads(json.dumps(turn).replace(_TURN, "before"))
            answer = results[0] | ({} if called else {"role": self.answer_role})
            earlier = [{"role": "user", "content": "other"}, before, answer]
            if text != self.text_after(results, called=called, turns=earlier):
                raise ValueError(f"{self.where} writes text after a turn that depends on earlier turns")
            if self.quotes.ids_in_pieces(text) != self.ids(text):
                raise ValueError(f"the tokenizer of {self.where} reads text between control tokens differently")
            shown = self.tokenizer.decode(self.ids_after([{"role": "tool", "content": quote}], called=called))
            if "one" not in text or quote not in shown:
                raise ValueError(f"{self.where} does not show tool results unchanged")
            ends[bool(called)] = self._behind_turn(self.render([_USER, turn, answer]), bool(called))[0]
        return ends


def _mapped(value: Any, quote: Callable[[str], str]) -> Any:
    """Return a JSON value with ``quote`` applied to its texts."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        return {quote(key): _mapped(inner, quote) for key, inner in value.items()}
    return [_mapped(inner, quote) for inner in value] if isinstance(value, list) else value
