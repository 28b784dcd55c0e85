"""An agent program as a graph of LangGraph."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

from experiments.worlds.colours.agents import TURNS, result, search
from rollout.programs.base import Model
from rollout.trajectory import Task


async def with_langgraph(task: Task, model: Model) -> dict[str, Any]:
    """A graph of LangGraph with two nodes, the model and its tools."""
    searched: list[str] = []

    @tool("search")
    def look_up(query: str) -> str:
        """Look up the colour of a thing."""
        searched.append(query)
        return search(task, query)

    chat = ChatOpenAI(base_url=model.base_url, api_key=SecretStr(model.api_key), model=model.name).bind_tools([look_up])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([look_up]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    asked: Any = {"messages": [("user", task.question)]}
    state = await graph.compile().ainvoke(asked, {"recursion_limit": 2 * TURNS})
    return result(task, str(state["messages"][-1].content), len(searched))
