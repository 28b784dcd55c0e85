"""Exact tokens between two sampled turns, as a model's own chat template writes them.

A template renders whole conversations; a rollout needs what it writes *after* a sampled end of turn: for Qwen the line
break behind ``<|im_end|>`` (verl #6501 left it out), the tool messages, the header of the next turn. So a conversation
of placeholders is rendered and cut behind the end of its assistant's turn. Whatever the template does with earlier
turns (strip their thinking, rewrite their calls) lies before the cut and so cannot matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rollout.protocols.text import check_thinking, control_tokens
from rollout.tokenizer import Quotes, encode

Message = dict[str, Any]

_TURN = "placeholder of the assistant's turn"


class ChatBoundaries:
    """Rendering and cutting with one tokenizer and one list of tools.

    Args:
        tokenizer: Hugging Face tokenizer with a chat template.
        stop_token_ids: of the ends of a turn; the template's own must be one of them.
        tools: schemas that the template is given; empty: none.
        thinking: passed to the template as ``enable_thinking``; by default the template decides.
        newline: false: without the line break that the template writes behind an end of turn (verl #6501).

    Raises:
        ValueError: no chat template; one that cannot render tool messages, does not end the assistant's turn with one
            of ``stop_token_ids``, or writes after a turn what depends on the turns before; ``thinking`` for a template
            without such a choice.
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
        self._where = f"the chat template of {tokenizer.name_or_path!r}"
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {tokenizer.name_or_path!r} has no chat template; tool calls need one")
        special = sorted(control_tokens(tokenizer), key=len, reverse=True)
        self._special = {token: tokenizer.convert_tokens_to_ids(token) for token in special}
        self.quotes = Quotes(tokenizer)
        listed = set(stop_token_ids)
        self.ends = tuple(token for token, token_id in self._special.items() if token_id in listed)
        self._end = re.compile("|".join(map(re.escape, self.ends)) or "(?!)")
        self._turns = self._placeholders()
        self.end = self._checked()  # the template's own end of an assistant's turn
        self.end_id: int = self._special[self.end]
        self.header = self.render([{"role": "user", "content": "question"}])
        self.opened = "<think>" if self.header.rstrip().endswith("<think>") else ""  # thinking begins in the prompt
        check_thinking(tokenizer, thinking, bool(self.opened))

    def without_end(self, text: str) -> tuple[str, bool]:
        """A sampled turn without the token that ends it, and whether there was one."""
        end = next((end for end in self.ends if text.endswith(end)), None)
        return text.removesuffix(end or ""), end is not None

    def render(self, messages: Sequence[Message], *, tools: bool = True, open_turn: bool = True) -> str:
        """The template's text; ``open_turn``: with the header of the assistant's next turn. Raises ValueError where the
        template refuses the messages."""
        from jinja2 import TemplateError  # with transformers, which takes seconds to import

        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=self.tools if tools and self.tools else None,
                add_generation_prompt=open_turn,
                tokenize=False,
                **self.options,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self._where} cannot render the messages: {error}") from error

    def ids(self, text: str) -> list[int]:
        """Ids of rendered text: control tokens become their ids, everywhere."""
        return encode(self.tokenizer, text)

    def ids_after(self, messages: Sequence[Message], *, called: bool, ended: bool = True) -> list[int]:
        """Ids of everything between an assistant's turn and its next one: ``messages``, then the header.

        Args:
            messages: of the tools, or a user's; see ``hide`` for what their contents quote.
            called: the turn before held a call.
            ended: the turn before holds its end; else the ids begin with it.
        """
        written = self.quotes.ids(self.text_after(self.hide(messages), called=called))
        return written if ended else [self.end_id, *written]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a whole prompt that ends with the header of the assistant's turn; see ``hide`` for what the contents
        quote."""
        return self.quotes.ids(self.render(self.hide(messages)))

    def text_after(self, messages: Sequence[Message], *, called: bool, turns: Sequence[Message] = ()) -> str:
        """What the template writes behind the end of an assistant's turn. ``turns``: the conversation before it."""
        before = turns or [{"role": "user", "content": "question"}]
        _, found, rest = self.render([*before, self._turns[called], *messages]).partition(_TURN)
        end = self._end.search(rest)
        if not found or end is None:
            raise ValueError(f"{self._where} shows no end of the assistant's turn that is a stop token")
        after = rest[end.end() :]
        return after if self.newline else after.removeprefix("\n")

    def call_format(self) -> str:
        """How the template writes a call: "hermes" or "llama3"; "hermes" where it writes none."""
        text = self.render([{"role": "user", "content": "question"}, self._turns[True]], tools=False, open_turn=False)
        return "llama3" if re.search(r'"parameters"\s*:', text) and "<tool_call>" not in text else "hermes"

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """The messages quoted (``Quotes``): of tools' contents, which come from outside, all tags; of others' the
        control tokens, since a prompt may ask for ``<think>``: who puts text from outside into one quotes it there."""
        quote = {"tool": self.quotes.quote}
        return [{**m, "content": quote.get(m["role"], self.quotes.quote_special)(m["content"])} for m in messages]

    def _placeholders(self) -> dict[bool, Message]:
        """By whether the turn held a call: a turn whose end can be found."""
        said = {"role": "assistant", "content": _TURN}
        name = self.tools[0]["function"]["name"] if self.tools else "tool"
        call = {"type": "function", "function": {"name": name, "arguments": {"argument": _TURN}}}
        turns = {False: said, True: {"role": "assistant", "content": "", "tool_calls": [call]}}
        shown: dict[bool, Message] = {}
        failure: ValueError | None = None
        for called, turn in turns.items():
            self._turns = {called: turn}
            try:
                self.text_after([{"role": "tool", "content": "result"}], called=called)
            except ValueError as error:
                failure = error
            else:
                shown[called] = turn
        if not shown:
            ends = ", ".join(self.ends) or "none"
            raise ValueError(
                f"{self._where} cannot be used for tool calls: {failure}; expected one that renders the roles user, "
                f"assistant and tool, and ends the assistant's turn with a stop token ({ends}); see eos_token and "
                "generation_config.json"
            ) from failure
        return {called: shown.get(called, next(iter(shown.values()))) for called in turns}

    def _checked(self) -> str:
        """The template's end of turn. Raises ValueError where cutting would not be exact."""
        quote = f"[{next(iter(self._special))}]"
        results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two."}]
        ends = set()
        for called, turn in self._turns.items():
            text = self.text_after(results, called=called)
            before = json.loads(json.dumps(turn).replace(_TURN, "before"))
            earlier = [{"role": "user", "content": "other"}, before, results[0]]
            if text != self.text_after(results, called=called, turns=earlier):
                raise ValueError(f"{self._where} writes after a turn what depends on the turns before")
            if self.quotes.ids_in_pieces(text) != self.ids(text):
                raise ValueError(f"the tokenizer of {self._where} reads text between control tokens differently")
            shown = self.tokenizer.decode(self.ids_after([{"role": "tool", "content": quote}], called=called))
            if "one" not in text or quote not in shown:
                raise ValueError(f"{self._where} does not show what a tool returned, or not as it is")
            _, _, rest = self.render([{"role": "user", "content": "question"}, turn, *results]).partition(_TURN)
            ends.add(self._end.search(rest)[0])  # type: ignore[index]  # text_after has found it
        if len(ends) > 1:
            raise ValueError(f"{self._where} ends turns with {' and '.join(sorted(ends))}; expected one end")
        return ends.pop()
