"""The colours of a task as an MCP server with one tool. It reads the task from ``TASK_FILE``."""

import json
import os
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("colours")


@server.tool()
def search(query: str) -> str:
    """Look up the colour of a thing."""
    facts = json.loads(Path(os.environ["TASK_FILE"]).read_text())["metadata"]["facts"]
    return " ".join(f"the {word} is {facts[word]}." for word in query.split() if word in facts) or "nothing found."


if __name__ == "__main__":
    server.run()
