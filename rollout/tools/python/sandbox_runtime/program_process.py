"""The server's record of one sandboxed process: its pipes, its deadline, its result."""

import os
import select
import time

import worker
import zygote

FLOOD = 16 << 20  # bytes of output; a program that prints more is stopped
START_S = 15.0  # until a process has confined itself and read its program
BEGUN = worker.READY + worker.STARTED
LEFT_OUT = b"\n[... output left out ...]\n"


class Program:
    """One forked interpreter for one sandboxed program: warm until it receives the program, then watched until it
    ends."""

    def __init__(self, origin: zygote.Zygote, number: int, kept: int) -> None:
        self.origin, self.number = origin, number
        self.source, self.output = origin.start(number)
        for fd in (self.source, self.output):
            os.set_blocking(fd, False)
        self.unread = memoryview(b"")  # rest of program and standard input
        self.id, self.order = 0, {}
        self.deadline, self.timeout_s, self.begun = float("inf"), 0.0, False
        self.was_warm = False  # when it received its program
        self.why = ""  # reason of a stop: "timeout" (before it began: the machine is slow), "flood" or "cancelled"
        self.head, self.tail, self.size, self.kept = bytearray(), bytearray(), 0, kept

    def give(self, id: int, order: dict) -> None:
        self.id, self.order, self.timeout_s = id, order, order["timeout_s"]
        self.deadline = time.monotonic() + START_S
        code, stdin = (order[key].encode("utf-8", "replace") for key in ("code", "stdin"))
        self.unread = memoryview(worker.LENGTH.pack(len(code)) + code + stdin)

    def feed(self) -> bool:
        """Write program text and standard input to the process, as much as the pipe takes without blocking. Returns
        False when all input is written."""
        try:
            while self.unread:
                self.unread = self.unread[os.write(self.source, self.unread) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it closed its input, or is dead, which the zygote reports
            self.unread = memoryview(b"")
        return False

    def end_of_input(self) -> None:
        os.close(self.source)
        self.source = -1

    def read(self) -> bool:
        """Read the program's output into the buffers. Returns False at its end."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self.size += len(data)
        room = self.kept - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-(self.kept // 4) :]
        if not self.begun and self.head.startswith(BEGUN):
            self.begun, self.deadline = True, self.deadline if self.why else time.monotonic() + self.timeout_s
        if self.size > FLOOD:
            self.stop("flood")
        return bool(data)

    def stop(self, why: str) -> None:
        if not self.why:
            self.why, self.deadline = why, float("inf")
            self.origin.stop(self.number)

    def result(self, code: int) -> dict:
        """Return the program's status, exit code and output, for the trainer. Called once, after the process has
        ended."""
        while self.size <= FLOOD and self.read() and select.select([self.output], [], [], 0)[0]:
            pass
        for fd in (self.output, self.source):
            if fd >= 0:
                os.close(fd)
        head = bytes(self.head).removeprefix(BEGUN)
        if self.size > len(self.head) + len(self.tail):
            head += LEFT_OUT
        if self.why == "timeout" and not self.begun:
            head += b"not ready after %d s" % START_S
        reason = self.why or "ended"
        return {
            "status": reason if self.begun or self.why == "cancelled" else "broken",
            "code": code,
            "output": (head + self.tail).decode("utf-8", "replace"),
        }
