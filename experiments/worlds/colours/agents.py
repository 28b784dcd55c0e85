"""Three agent programs that use OpenAI's client. ``langgraph_agent.py`` and ``agent.sh`` are two more."""

from __future__ import annotations

import json
from typing import Any

from openai import NOT_GIVEN, AsyncOpenAI

from rollout.programs.base import Model
from rollout.trajectory import Task

SEARCH: Any = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}
TURNS = 4  # of one conversation


def search(task: Task, query: str) -> str:
    facts = task.metadata.get("facts", {})
    return " ".join(f"the {word} is {facts[word]}." for word in query.split() if word in facts) or "nothing found."


def result(task: Task, answer: str | None, searches: int) -> dict[str, Any]:
    """Return the answer and its reward: 1 if it is right, less 0.2 for each search after the first."""
    right = (answer or "").strip() in task.golden_answers
    reward = float(right) * max(0.0, 1 - 0.2 * max(0, searches - 1))
    return {"reward": reward, "answer": answer, "metrics": {"em": float(right), "looked_up": searches}}


async def turn(client: AsyncOpenAI, model: Model, messages: list[Any], tools: Any = NOT_GIVEN) -> Any:
    """Return the model's next message."""
    said = await client.chat.completions.create(model=model.name, messages=messages, tools=tools)
    return said.choices[0].message


async def converse(client: AsyncOpenAI, model: Model, task: Task, messages: list[Any]) -> tuple[str | None, int]:
    """Let the model search until it answers. Return its answer and the number of searches."""
    searches = 0
    for _ in range(TURNS):
        said: Any = await turn(client, model, messages, [SEARCH])
        messages.append(said)
        if not said.tool_calls:
            return said.content, searches
        for call in said.tool_calls:
            searches += 1
            found = search(task, str(json.loads(call.function.arguments).get("query", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return None, searches


async def with_openai(task: Task, model: Model) -> dict[str, Any]:
    """One conversation with one tool."""
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        return result(task, *await converse(client, model, task, [{"role": "user", "content": task.question}]))


async def planner_and_worker(task: Task, model: Model) -> dict[str, Any]:
    """A planner decides what to look up and answers; a worker, in its own conversation, searches."""
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        plan: list[Any] = [{"role": "user", "content": f"{task.question}\nWhich word shall I look up?"}]
        wanted = await turn(client, model, plan)
        work = [{"role": "user", "content": f"{task.question}\nLook up: {wanted.content}"}]
        found, searches = await converse(client, model, task, work)
        plan += [wanted, {"role": "user", "content": f"The worker says: it is {found}.\nThe answer?"}]
        answer = await turn(client, model, plan)
    return result(task, answer.content, searches)


async def compacting(task: Task, model: Model) -> dict[str, Any]:
    """Searches once or twice in one conversation, then goes on with a note instead of it."""
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        note, searches = "none.", 0
        while note in ("none.", "nothing found.") and searches < TURNS:
            asked: Any = [{"role": "user", "content": f"{task.question}\nNote: {note}"}]
            said = await turn(client, model, asked, [SEARCH])
            for call in said.tool_calls or ():
                note = search(task, str(json.loads(call.function.arguments).get("query", "")))
            searches += 1
        compacted: Any = [{"role": "user", "content": f"{task.question}\nNote: {note}\nThe answer?"}]
        answer = await turn(client, model, compacted)
    return result(task, answer.content, searches)
