"""Fork server of the sandbox: keeps warm interpreters, runs one program in each; single-threaded.

    python -s -S -B server.py '{"control": 7, ...}'

The server holds nothing worth stealing: an empty environment, the control socket, no project. It leaves the trainer's
namespaces (a monitor process stays outside and waits), loads the standard library, enters the view of programs, and
splits off the process that programs are forked from (`zygote.py`). Only then does it take orders. Programs confine
themselves further (`worker.py`); their memory holds no other program's data.

Frames on the control socket, both ways: two little-endian uint32 (id, length), then JSON. In: {"code", "stdin",
"timeout_s"} or {"cancel": true}. Out: first, with id 0, {"mechanisms", "failures"} or {"error"}; later {"status",
"code", "output"} per program. The end of the socket ends everything.
"""

import gc
import itertools
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable

import linux
import prepare
import worker
import zygote
from program_process import Program

HEADER = struct.Struct("<II")
RETRY_MS = 100.0  # until descriptors are asked for again


class Server:
    def __init__(self, control: int, origin: zygote.Zygote, warm: int, kept: int) -> None:
        self.control, self.origin, self.warm, self.kept = control, origin, warm, kept
        self.numbers = itertools.count(1)
        self.alive: dict[int, Program] = {}  # by number
        self.idle: list[Program] = []
        self.refill = True
        self.running: dict[int, Program] = {}  # by the order's id
        self.queued: dict[int, dict] = {}  # orders to begin, by id: in the next round, or once there are descriptors
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[], object]] = {}
        self.received, self.unsent = bytearray(), bytearray()
        os.set_blocking(control, False)
        self.watch(origin.statuses, self.look_for_ends)

    def serve(self, report: dict) -> None:
        """Run programs until the trainer closes its end of the socket. Then no program is left running."""
        self.send(0, report)
        try:
            self._serve()
        finally:
            self.origin.close()

    def _serve(self) -> None:
        while True:
            self._begin_queued()
            if self._wants_more():
                try:
                    self.idle.append(self.spawn())  # one while idle, then poll again
                except OSError:
                    self.refill = False  # until the next order
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
        """Return milliseconds until the next action is due, or None to wait for events only."""
        if self.queued:
            return RETRY_MS
        if not self.running:
            return 0 if self._wants_more() else None
        soonest = min(p.deadline for p in self.running.values())
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic()) * 1000 + 1

    def _begin_queued(self) -> None:
        for id in list(self.queued):
            warm = bool(self.idle)
            try:
                program = self.idle.pop(0) if warm else self.spawn()
            except OSError:
                return
            program.was_warm = warm
            self.begin(id, self.queued.pop(id), program)

    def spawn(self) -> Program:
        """Start and return a process for a later program. Raises OSError if no descriptors are left, here or on the
        machine."""
        number = next(self.numbers) & 0xFFFFFFFF
        program = self.alive[number] = Program(self.origin, number, self.kept)
        return program

    def watch(self, fd: int, handler: Callable[[], object], event: int = select.POLLIN) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, event)

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

    def obey(self, id: int, order: dict) -> None:
        if "cancel" in order:
            self.queued.pop(id, None)
            if id in self.running:
                self.running[id].stop("cancelled")
            return
        self.refill = True
        self.queued[id] = order

    def begin(self, id: int, order: dict, program: Program) -> None:
        self.running[id] = program
        program.give(id, order)
        self.watch(program.output, lambda: program.read() or self.forget(program.output))
        self.watch(program.source, lambda: self.feed(program), select.POLLOUT)
        self.feed(program)

    def feed(self, program: Program) -> None:
        if not program.feed():
            self.forget(program.source)
            program.end_of_input()

    def look_for_ends(self) -> None:
        for number, code in self.origin.ended():
            self.end(self.alive.pop(number), code)

    def end(self, program: Program, code: int) -> None:
        """Handle the end of a program's process, whether it ran a program or waited for one."""
        self.forget(program.output)
        self.forget(program.source)
        result = program.result(code)
        if program in self.idle:
            self.idle.remove(program)
            # If it could not start, the next might not either: wait for the next order, which gets the error.
            self.refill = self.refill and result["status"] != "broken"
            return
        del self.running[program.id]
        if result["status"] == "broken" and program.was_warm and not program.why:
            self.queued[program.id] = program.order  # it died before it read its program: try once more
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


def main() -> tuple[worker.Confinement, int, int] | None:
    """Run the sandbox's server. Returns only in the process of a program, with the arguments of `worker.run`."""
    options = json.loads(sys.argv[1])
    control = options["control"]
    os.environ.clear()
    sys.argv[:], sys.orig_argv[:] = [""], [""]
    os.chdir("/")
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # when the machine runs out of memory, the kernel kills the sandbox before the trainer
    except OSError:
        pass
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # three for each program
    mechanisms, failures = prepare.isolate(options["mechanisms"])
    child = os.fork()
    if child:  # the monitor: it outlives the server only to report its end; if it is killed, the server dies too
        os.close(control)
        sys.exit(min(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), 255))
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        confinement = prepare.arrange(options, mechanisms, failures)
        sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
        gc.collect()
        gc.freeze()  # so that a program's garbage collection does not copy shared memory
    except Exception as error:
        body = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        os.write(control, HEADER.pack(0, len(body)) + body)
        raise
    origin = zygote.begin(control)
    if not isinstance(origin, zygote.Zygote):
        return confinement, *origin
    server = Server(control, origin, options["warm"], options["kept"])
    server.serve({"mechanisms": mechanisms, "failures": failures, "view": confinement.view})
    return None


if __name__ == "__main__":
    if begun := main():
        worker.run(*begun)  # from here, so that the frames of `main` and their objects are gone
