"""An MCP server with a state and with faults: ``note_server.py`` over stdio, ``note_server.py PORT`` over HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)}: {' '.join(notes)}"


@server.tool()
def task() -> str:
    """The task."""
    return f"{os.environ.get('TASK_ID')} {os.environ.get('TASK_QUESTION')} {open(os.environ['TASK_FILE']).read()}"


@server.tool()
def fails(text: str = "") -> str:
    raise ValueError("no such thing")


@server.tool()
def dies() -> str:
    os._exit(3)


@server.tool()
def sleeps() -> str:
    time.sleep(60)
    return "late"


@server.tool()
def numbers() -> dict[str, int]:
    return {"a": 1}


if __name__ == "__main__":
    server.run() if len(sys.argv) == 1 else server.run("streamable-http", port=int(sys.argv[1]))
