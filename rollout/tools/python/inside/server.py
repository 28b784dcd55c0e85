"""The process that keeps warm interpreters and runs one program in each: a small, single-threaded fork server.

    python -s -S -B server.py '{"control": 7, ...}'

It knows nothing worth stealing: an empty environment, no descriptors but the control socket, no project. It leaves the
trainer's namespaces (a monitor process stays outside and waits), loads the standard library, enters the view that
programs get, and only then takes orders. Programs are forked from it and confine themselves further (`worker.py`).

Frames on the control socket, both ways: two little-endian uint32 (id, length), then JSON. In: {"code", "timeout_s"} or
{"cancel": true}. Out: first, with id 0, what could be arranged ({"mechanisms", "failures"}) or {"error"}; later
{"status", "code", "output"} per program. The end of the socket ends everything.
"""

import gc
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable

import linux
import prepare
import worker

FLOOD = 16 << 20  # bytes of output after which a program is stopped
LEFT_OUT = b"\n[... output left out ...]\n"
HEADER = struct.Struct("<II")


class Program:
    """One forked interpreter: warm until it is given a program, then watched until it has ended."""

    def __init__(self, confinement: worker.Confinement, kept: int) -> None:
        source, self.source = os.pipe()
        self.output, output = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            worker.run(confinement, source, output)
        os.close(source)
        os.close(output)
        os.set_blocking(self.output, False)
        self.ended = os.pidfd_open(self.pid)
        self.id, self.order = 0, {}
        self.deadline = float("inf")
        self.was_warm = False  # when it was given its program
        self.why = ""  # it was stopped: "timeout", "flood" or "cancelled"
        self.head, self.tail, self.size, self.kept = bytearray(), bytearray(), 0, kept

    def give(self, id: int, order: dict) -> None:
        self.id, self.order, self.deadline = id, order, time.monotonic() + order["timeout_s"]
        try:  # no more than a pipe holds, so this does not wait
            os.write(self.source, order["code"].encode("utf-8", "replace"))
        except BrokenPipeError:
            pass  # it is dead, which shows soon
        os.close(self.source)
        self.source = -1

    def read(self) -> bool:
        """Take what has been printed; False at the end of it."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self.size += len(data)
        room = self.kept - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[room:])[-(self.kept // 4) :]
        if self.size > FLOOD:
            self.stop("flood")
        return bool(data)

    def stop(self, why: str) -> None:
        self.why = self.why or why
        self.deadline = float("inf")
        os.kill(self.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own

    def reap(self) -> dict:
        while self.size <= FLOOD and self.read() and select.select([self.output], [], [], 0)[0]:
            pass
        status = os.waitpid(self.pid, 0)[1]
        for fd in (self.output, self.ended, self.source):
            if fd >= 0:
                os.close(fd)
        marks = worker.READY + worker.STARTED
        started, head = self.head.startswith(marks), bytes(self.head).removeprefix(marks)
        if self.size > len(self.head) + len(self.tail):
            head += LEFT_OUT
        word = self.why or "ended"
        return {
            "status": word if started or self.why == "cancelled" else "broken",
            "code": os.waitstatus_to_exitcode(status),
            "output": (head + self.tail).decode("utf-8", "replace"),
        }


class Server:
    def __init__(self, control: int, confinement: worker.Confinement, warm: int, kept: int) -> None:
        self.control, self.confinement, self.warm, self.kept = control, confinement, warm, kept
        self.idle: list[Program] = []
        self.refill = True
        self.running: dict[int, Program] = {}
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[], object]] = {}
        self.received, self.unsent = bytearray(), bytearray()
        os.set_blocking(control, False)

    def serve(self, report: dict) -> None:
        """Until the trainer closes its end; then nothing is left running."""
        self.send(0, report)
        try:
            self._serve()
        finally:
            for program in (*self.idle, *self.running.values()):
                program.stop("cancelled")
                program.reap()

    def _serve(self) -> None:
        while True:
            if self._wants_more():
                self.idle.append(self.spawn())  # while nothing else is to be done; one, then a look around
            wanted = select.POLLIN | (select.POLLOUT if self.unsent else 0)
            self.poll.register(self.control, wanted)
            for fd, event in self.poll.poll(self._patience()):
                if fd != self.control:
                    if fd in self.handlers:  # not closed by an earlier handler of this round
                        self.handlers[fd]()
                    continue
                if event & select.POLLOUT:
                    self.send()
                if event & ~select.POLLOUT and not self.receive():
                    return
            now = time.monotonic()
            for late in [p for p in self.running.values() if p.deadline <= now]:
                late.stop("timeout")

    def _wants_more(self) -> bool:
        return self.refill and not self.running and len(self.idle) < self.warm

    def _patience(self) -> float | None:
        """Milliseconds until something is to be done anyway; None: for ever."""
        if not self.running:
            return 0 if self._wants_more() else None
        soonest = min(p.deadline for p in self.running.values())
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic()) * 1000 + 1

    def spawn(self) -> Program:
        program = Program(self.confinement, self.kept)
        self.watch(program.ended, lambda: self.end(program))
        return program

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    def receive(self) -> bool:
        try:
            data = os.read(self.control, 1 << 16)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self.received += data
        while len(self.received) >= HEADER.size:
            id, length = HEADER.unpack_from(self.received)
            if len(self.received) < HEADER.size + length:
                break
            order = json.loads(bytes(self.received[HEADER.size : HEADER.size + length]))
            del self.received[: HEADER.size + length]
            self.obey(id, order)
        return bool(data)

    def obey(self, id: int, order: dict, fresh: Program | None = None) -> None:
        if "cancel" in order:
            if id in self.running:
                self.running[id].stop("cancelled")
            return
        self.refill = True
        program = fresh or (self.idle.pop(0) if self.idle else self.spawn())
        program.was_warm = fresh is None
        self.running[id] = program
        program.give(id, order)
        self.watch(program.output, lambda: program.read() or self.forget(program.output))

    def end(self, program: Program) -> None:
        """A process is gone: with its program, or, if it was still waiting, for reasons of its own."""
        self.forget(program.output)
        self.forget(program.ended)
        result = program.reap()
        if program in self.idle:
            self.idle.remove(program)
            # if it could not even start, the next might not either: no more of them until somebody asks, and hears
            self.refill = self.refill and result["status"] != "broken"
            return
        del self.running[program.id]
        if result["status"] == "broken" and program.was_warm and not program.why:
            self.obey(program.id, program.order, self.spawn())  # it died before it had read its program: once more
        elif result["status"] != "cancelled":
            self.send(program.id, result)

    def send(self, id: int = 0, message: dict | None = None) -> None:
        if message is not None:
            body = json.dumps(message).encode()
            self.unsent += HEADER.pack(id, len(body)) + body
        try:
            del self.unsent[: os.write(self.control, self.unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.unsent.clear()  # receive() will see the end


def main() -> None:
    options = json.loads(sys.argv[1])
    control = options["control"]
    os.environ.clear()
    sys.argv[:], sys.orig_argv[:] = [""], [""]
    os.chdir("/")
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # when memory runs out on the machine, the trainer is not the first to go
    except OSError:
        pass
    mechanisms, failures = prepare.isolate(options["mechanisms"])
    server = os.fork()
    if server:  # the monitor: it outlives the server only to report its end; if it is killed, the server dies too
        os.close(control)
        sys.exit(min(abs(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])), 255))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        confinement = prepare.arrange(options, mechanisms, failures)
        sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
        gc.collect()
        gc.freeze()  # so that a program's garbage collection does not copy what all of them share
        state = Server(control, confinement, options["warm"], options["kept"])
    except Exception as error:
        body = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        os.write(control, HEADER.pack(0, len(body)) + body)
        raise
    state.serve({"mechanisms": mechanisms, "failures": failures, "view": confinement.view})


if __name__ == "__main__":
    main()
