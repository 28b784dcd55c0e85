"""Schemas of tools (OpenAI's function schemas), as chat templates show them to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "code_interpreter": {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs a Python program and returns what it prints. Every call starts from nothing: no "
            "variable of an earlier call is left.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The whole program."}},
                "required": ["code"],
            },
        },
    },
    "search": {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches a text collection and returns the passages that fit the query best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}},
                "required": ["query"],
            },
        },
    },
}


def read_schemas(tools: Sequence[str | dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the function schemas of tools, given as names of ``SCHEMAS``, paths of JSON files with a schema or a list
    of them, or schemas themselves ({"type": "function", "function": {...}}, or the inner object alone).

    Raises ValueError for an unknown name, a wrong schema, or two tools of one name.
    """
    schemas = tuple(schema for tool in tools for schema in _schemas(tool))
    names = tool_names(schemas)
    if len(set(names)) < len(names):
        raise ValueError(f"two tools have one name: {', '.join(names)}; expected each once")
    return schemas


def tool_names(schemas: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(schema["function"]["name"] for schema in schemas)


def _schemas(tool: str | dict[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(tool, str):
        return [_wrapped(tool, "tool schema")]
    return [SCHEMAS[tool]] if tool in SCHEMAS else _from_file(tool)


def _from_file(tool: str) -> list[dict[str, Any]]:
    path = Path(tool)
    if not path.is_file():
        raise ValueError(f"tool {tool!r} is neither one of {', '.join(sorted(SCHEMAS))} nor a JSON file with a schema")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tool schema {path} cannot be read as JSON: {error}") from error
    several = found if isinstance(found, list) else [found]
    return [_wrapped(schema, f"tool schema {path}") for schema in several]


def _wrapped(schema: Any, where: str) -> dict[str, Any]:
    function = schema.get("function", schema) if isinstance(schema, dict) else {}
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(parameters, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(
            f"{where}: expected an object with a text 'name' and an object 'parameters' (alone, or as "
            '\'function\' of {"type": "function", "function": {...}})'
        )
    return {"type": "function", "function": function}
