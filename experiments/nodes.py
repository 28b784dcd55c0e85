"""Several nodes that make one experiment: node 0 leads, the others help with the stages that run on all of them.

One TCP connection per helper, to MASTER_ADDR:MASTER_PORT, carries JSON lines. Node 0 says which folder to run and
where its rendezvous is; a helper says how it ended. A connection that closes is a node that is gone, so that nobody
waits for a dead one. What a helper may do is bounded: ``experiments stage FOLDER``, for a folder under the outputs.

A helper answers with what stands in a file that node 0 has just written: thereby both know that they share a file
system, and that they belong together.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from callbacks.records import commit, duration
from experiments.errors import ExperimentError
from experiments.launch import Launch
from experiments.project import Project

VISIBLE_S = 20.0  # network file systems show a new file late
REMIND_S = 60.0
Message = dict[str, Any]


class NodeLost(Exception):
    """Another node has ended, or its part has failed."""


class Connection:
    """JSON lines over a socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._received = b""
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):  # a machine that died
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        # Keep-alive says nothing while something sent is not acknowledged yet.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50_000)

    def send(self, **message: Any) -> None:
        """Raises NodeLost."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise NodeLost(f"the connection is gone ({error})") from None

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None when time is up. Raises NodeLost at the connection's end, and for what is none."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                data = self._socket.recv(65536)
            except OSError as error:
                raise NodeLost(f"the connection is gone ({error})") from None
            if not data:
                raise NodeLost("the connection was closed")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NodeLost(f"what came is no message of a node: {line[:80]!r}")
        return message

    def close(self) -> None:
        self._socket.close()


class Crew:
    """The helpers, as node 0 sees them."""

    def __init__(self, launch: Launch, project: Project, say: Callable[[str], None] = print) -> None:
        self.launch, self._project, self._say = launch, project, say
        self._helpers: dict[int, Connection] = {}
        self._hosts: dict[int, str] = {}
        self._ended: dict[int, int] = {}  # node -> exit code of its part of the present stage
        self._trouble: str | None = None
        self.stop_asked = False  # a helper was told to stop (a time limit reaches every node)

    def gather(self) -> None:
        """Wait until every node has reported and sees this one's outputs.

        Raises:
            ExperimentError: one did not come within the launch's timeout, or does not fit.
        """
        expected = set(range(1, self.launch.nodes))
        if not expected:
            return
        token, path = secrets.token_hex(16), self._project.outputs / f".launch-{os.getpid()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(token)
        self._say(
            f"  node 0 ({os.uname().nodename}) waits at {self.launch.address}:{self.launch.port} for "
            f"{len(expected)} more of {self.launch.nodes} nodes, {duration(self.launch.timeout_s)} at most"
        )
        try:
            with self._listen() as listener:
                deadline = time.monotonic() + self.launch.timeout_s
                while missing := expected - set(self._helpers):
                    listener.settimeout(max(0.01, deadline - time.monotonic()))
                    try:
                        stream, _ = listener.accept()
                    except TimeoutError:
                        raise ExperimentError(self._absent(missing)) from None
                    self._admit(Connection(stream), token, path, expected)
        finally:
            path.unlink(missing_ok=True)

    def _absent(self, missing: set[int]) -> str:
        nodes = ", ".join(str(node) for node in sorted(missing))
        return (
            f"node {nodes} of {self.launch.nodes} did not report to {self.launch.address}:{self.launch.port} within "
            f"{duration(self.launch.timeout_s)} (LAUNCH_TIMEOUT, in seconds): run the same command there, with "
            "NODE_RANK set, and see that the port can be reached. Nothing has been run"
        )

    def _listen(self) -> socket.socket:
        error: OSError | None = None
        for address in (self.launch.address, ""):  # the name may stand for an interface that is not this machine's own
            try:
                return socket.create_server((address, self.launch.port))
            except OSError as caught:
                error = error or caught
        raise ExperimentError(
            f"node 0 cannot listen at {self.launch.address}:{self.launch.port} ({error}); choose another MASTER_PORT, "
            "the same on every node"
        )

    def _admit(self, helper: Connection, token: str, path: Path, expected: set[int]) -> None:
        try:
            helper.send(read=path.name)
            answer = helper.receive(VISIBLE_S + 30) or {}
        except NodeLost:
            answer = {}
        if not answer.keys() >= {"node", "token", "outputs", "host", "nodes", "commit"}:  # somebody else: a port scan
            helper.close()
            return
        node, problem = answer["node"], None
        if answer["token"] != token or answer["outputs"] != self._project.relative(path.parent):
            problem = (
                f"node {node} ({answer['host']}) does not see in its {answer['outputs']} what node 0 has just written "
                f"as {path}: all nodes must share the folder of the outputs (COMPACT_AGENTS_OUTPUTS), under one path"
            )
        elif node not in expected or node in self._helpers:
            problem = f"NODE_RANK {node} ({answer['host']}) was given twice, or is not in 1..{max(expected)}"
        elif answer["nodes"] != self.launch.nodes:
            problem = f"node {node} was told of {answer['nodes']} nodes, node 0 of {self.launch.nodes}"
        elif answer["commit"] != (here := commit()):
            problem = f"node {node} runs commit {answer['commit'][:9]}, node 0 {here[:9]}: take one commit on all"
        try:
            helper.send(refused=problem)
        except NodeLost:
            if problem is None:  # gone again: it may be started anew
                helper.close()
                return
        if problem:
            raise ExperimentError(problem)
        self._helpers[node], self._hosts[node] = helper, answer["host"]
        self._say(f"  node {node} ({answer['host']}) is there")

    # -- while working --------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """A line that every helper prints while it waits."""
        self._send(say=text)

    def begin(self, folder: Path, resume: bool) -> int:
        """Have every helper start its ranks of a stage; returns the port of the rendezvous on this node.

        Raises:
            NodeLost: a helper has gone meanwhile.
        """
        if trouble := self.trouble():
            raise NodeLost(trouble)
        port = free_port()
        self._ended = {}
        self._send(run=str(folder.relative_to(self._project.outputs)), resume=resume, port=port)
        return port

    def trouble(self) -> str | None:
        """What went wrong on another node, as far as is known now."""
        for node, helper in self._helpers.items():
            while self._trouble is None:
                try:
                    message = helper.receive(0)
                except NodeLost as error:
                    if node not in self._ended:
                        self._trouble = f"node {node} ({self._hosts[node]}) has gone: {error}"
                    break
                if message is None:
                    break
                self.stop_asked |= "stop" in message
                if "ended" in message:
                    self._ended[node] = message["ended"]
                    if message["ended"] != 0:
                        self._trouble = f"node {node} ({self._hosts[node]}) failed: exit code {message['ended']}"
        return self._trouble

    def finish(self) -> None:
        """Wait until every helper's ranks of the stage have ended. Raises NodeLost."""
        deadline = time.monotonic() + 60.0
        while set(self._helpers) - set(self._ended):
            if trouble := self.trouble():
                raise NodeLost(trouble)
            if time.monotonic() > deadline:
                raise NodeLost("the ranks of other nodes have not ended within 60 s of those here")
            time.sleep(0.05)

    def close(self, code: int) -> None:
        """Let the helpers go; ``code`` is what their commands end with."""
        try:
            self._send(done=code)
        finally:
            for helper in self._helpers.values():
                helper.close()
            self._helpers = {}

    def _send(self, **message: Any) -> None:
        for node, helper in self._helpers.items():
            try:
                helper.send(**message)
            except NodeLost as error:
                self._trouble = self._trouble or f"node {node} ({self._hosts[node]}) has gone: {error}"


def join(launch: Launch, project: Project, say: Callable[[str], None] = print) -> Connection:
    """Report to node 0.

    Raises:
        ExperimentError: nobody listens there within the launch's timeout, the outputs are not shared, or node 0 has
            refused this node.
    """
    leader = _connect(launch, say)
    try:
        asked = leader.receive(launch.timeout_s) or {}
        path = project.outputs / Path(asked["read"]).name
        deadline = time.monotonic() + VISIBLE_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        token = path.read_text() if path.exists() else None
        about = {"host": os.uname().nodename, "nodes": launch.nodes, "commit": commit()}
        about["outputs"] = project.relative(project.outputs)
        leader.send(node=launch.node_rank, token=token, **about)
        answer = leader.receive(launch.timeout_s) or {"refused": "no answer"}
    except (NodeLost, KeyError, ValueError) as error:
        raise ExperimentError(
            f"what listens at {launch.address}:{launch.port} is no node 0 of this project ({error}); see MASTER_ADDR "
            "and MASTER_PORT"
        ) from None
    if answer["refused"]:
        raise ExperimentError(answer["refused"])
    return leader


def _connect(launch: Launch, say: Callable[[str], None]) -> Connection:
    started, reminded = time.monotonic(), -REMIND_S
    while (waited := time.monotonic() - started) < launch.timeout_s:
        try:
            return Connection(socket.create_connection((launch.address, launch.port), timeout=10))
        except OSError as error:
            if waited - reminded >= REMIND_S:
                where = f"{launch.address}:{launch.port}"
                say(f"  node {launch.node_rank} waits for node 0 at {where} ({error}); for {duration(waited)} so far")
                reminded = waited
            time.sleep(0.5)
    raise ExperimentError(
        f"node 0 did not answer at {launch.address}:{launch.port} within {duration(launch.timeout_s)} "
        "(LAUNCH_TIMEOUT, in seconds): is the command running there (NODE_RANK=0), with these MASTER_ADDR and "
        "MASTER_PORT, and can the port be reached?"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
