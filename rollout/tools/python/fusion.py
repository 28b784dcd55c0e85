"""Runner of programs on a SandboxFusion service (bytedance/SandboxFusion, sandbox/server/sandbox_api.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from common.sessions import LoopSession
from rollout.services.http_client import ApiKey, post_json
from rollout.tools.python.base import Run, RunStatus, ended, middle_cut, readable, refused
from rollout.trajectory import InfrastructureError

DRIVER = Path(__file__).parent / "sandbox_runtime" / "program.py"
_NO_KEY = ApiKey(None, "SandboxFusion")


class SandboxFusion:
    """Runs programs on a SandboxFusion service, over ``POST {url}/run_code``. The service decides how well programs are
    confined; it needs Python 3.9 or newer. The program is sent inside the one that the local sandbox runs too, so that
    the last expression is printed and errors are short.

    One event loop at a time; a new loop gets new connections.

    Args:
        url: such as ``http://127.0.0.1:8080``, with or without ``/run_code``.
        timeout_s: seconds per program; keep it, and ``grace_s``, below the timeout of ``ToolLimits``.
        grace_s: further seconds for the service itself, queueing included, before it counts as failed.
        memory_mb: memory of a program; null for the service's limit.
        max_output: characters of output that are kept, from the beginning and the end.
        max_connections: requests in flight at once; waiting for a free connection does not count as the service's time.

    Raises:
        ValueError: a URL without http.
    """

    def __init__(
        self,
        url: str,
        timeout_s: PositiveFloat = 10.0,
        grace_s: NonNegativeFloat = 10.0,
        memory_mb: PositiveInt | None = None,
        max_output: PositiveInt = 10_000,
        max_connections: PositiveInt = 64,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'SandboxFusion: expected a url "http://host:port"; found {url!r}')
        self.url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self.concurrency = max_connections  # further programs wait before their time begins
        self.timeout_s, self.grace_s, self.max_output = timeout_s, grace_s, max_output
        self._memory = {} if memory_mb is None else {"memory_limit_MB": memory_mb}
        self._driver = DRIVER.read_text()
        self._session = LoopSession("SandboxFusion", max_connections)
        self._tried = False

    async def start(self) -> None:
        """Test the service with one program, the first time. Raises InfrastructureError unless it prints the expected
        text."""
        if self._tried:
            return
        run = await self.run("print(1)")
        if run != Run(RunStatus.FINISHED, "1\n"):
            raise InfrastructureError(
                f"{self.url}: tried print(1), expected it to finish and to print 1; found {run.status.value}, "
                f"{run.output + run.notice!r}. Does the service have Python 3.9 or newer, and memory_mb enough for it?"
            )
        self._tried = True

    async def run(self, code: str, stdin: str = "") -> Run:
        """Run one program on the service, and return its result. Raises InfrastructureError for a service that is
        absent, late or fails."""
        if (refusal := refused(code, stdin)) is not None:
            return refusal
        data = code.encode("utf-8", "replace")
        text = f"{self._driver}\n\nfresh_streams()\nos._exit(execute({data!r}.decode()))\n"
        body = {"code": text, "language": "python", "run_timeout": self.timeout_s, **self._memory}
        if stdin:
            body["stdin"] = stdin
        session, slots = self._session.open()
        try:
            async with slots:
                answer = await post_json(session, self.url, body, _NO_KEY, self.timeout_s + self.grace_s)
        except InfrastructureError as error:
            raise InfrastructureError(f"{error}; is the service running, or overloaded?") from error
        if answer.status != 200:
            raise InfrastructureError(f"{self.url}: status {answer.status}: {answer.excerpt}")
        try:
            return self._judge(json.loads(answer.body))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InfrastructureError(
                f"{self.url}: expected SandboxFusion's run_code answer, found {answer.excerpt}"
            ) from error

    def _judge(self, answer: dict[str, Any]) -> Run:
        if answer["status"] == "SandboxError":
            raise InfrastructureError(f"{self.url}: SandboxError: {str(answer.get('message'))[:300]}")
        result = answer["run_result"]
        text = (result.get("stdout") or "") + (result.get("stderr") or "")
        output = middle_cut(readable(text), self.max_output)
        if result["status"] == "TimeLimitExceeded":
            return ended(0, output, self.timeout_s)
        if result["status"] != "Finished" or not isinstance(result["return_code"], int):
            raise InfrastructureError(f"{self.url}: the run ended as {result['status']!r}, {text[-200:]!r}")
        code = result["return_code"]
        return ended(code, output, killed=f"The program was killed by signal {-code}.")

    async def close(self) -> None:
        """Close the HTTP connections; a later program opens new ones."""
        self._tried = False
        await self._session.close()
