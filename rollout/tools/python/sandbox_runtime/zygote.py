"""Zygote: the process that programs are forked from.

A fork inherits all of its parent's memory, and the server's memory has other trajectories' programs and outputs. So the
server does not fork. The zygote is split off before the first order, knows each program only as a number, and holds its
pipes only while it forks.

The server sends packets (REQUEST). The ends of processes return through a pipe (STATUS) that holds thousands of them,
so neither side can block the other.
"""

import os
import select
import signal
import socket
import struct

import linux

REQUEST = struct.Struct("<I?")  # the server's number for it; start it (its two descriptors come along), or kill it
STATUS = struct.Struct("<Ii")  # number, exit code as of os.waitstatus_to_exitcode


class Zygote:
    """The server's connection to the zygote, the process that forks the programs' processes."""

    def __init__(self, pid: int, requests: socket.socket, statuses: int) -> None:
        self.pid, self.requests, self.statuses = pid, requests, statuses

    def start(self, number: int) -> tuple[int, int]:
        """Start a program's process. Returns file descriptors to write its program and to read its output. Raises
        OSError."""
        fds: list[int] = []
        try:
            fds += os.pipe()
            fds += os.pipe()
            source, to_source, from_output, output = fds
            socket.send_fds(self.requests, [REQUEST.pack(number, True)], [source, output])
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        os.close(source)
        os.close(output)
        return to_source, from_output

    def stop(self, number: int) -> None:
        """Kill a program's process. Does nothing if the process has ended."""
        self.requests.send(REQUEST.pack(number, False))

    def ended(self) -> list[tuple[int, int]]:
        """Wait until at least one program has ended, and return (program number, exit code) of each program that has
        ended."""
        data = os.read(self.statuses, 1024 * STATUS.size)  # whole records: small writes to a pipe are atomic
        if not data:
            raise RuntimeError("the process that programs are forked from ended")
        return list(STATUS.iter_unpack(data))

    def close(self) -> None:
        """End the zygote process and every program. Returns when all are gone."""
        self.requests.close()
        os.waitpid(self.pid, 0)


def begin(control: int) -> Zygote | tuple[int, int]:
    """Fork the zygote, the process that forks one process per program. In the server, return the connection to the
    zygote. In each program's process, return its descriptors (read the program, write output). ``control``: descriptor
    that only the server keeps."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told, tell = os.pipe()
    pid = os.fork()
    if pid:
        theirs.close()
        os.close(tell)
        return Zygote(pid, ours, told)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(control)
    os.close(told)
    ours.close()
    return _fork_on_request(theirs, tell)


def _fork_on_request(requests: socket.socket, statuses: int) -> tuple[int, int]:
    pids: dict[int, int] = {}  # by number
    ends: dict[int, int] = {}  # number by process descriptor
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in ends:
                number = ends.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                _tell(statuses, number, os.waitstatus_to_exitcode(os.waitpid(pids.pop(number), 0)[1]))
                continue
            data, fds, _, _ = socket.recv_fds(requests, REQUEST.size, 2)
            if not data:  # the server's end is closed
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
                for pid in pids.values():
                    os.waitpid(pid, 0)
                os._exit(0)
            number, start = REQUEST.unpack(data)
            if not start:
                if number in pids:  # not yet waited for, so the process id is still its own
                    os.kill(pids[number], signal.SIGKILL)
                continue
            if len(fds) == 2:
                source, output = fds
                try:
                    pid = os.fork()
                except OSError as error:
                    os.write(output, f"no process could be made: {error}".encode())
                    _tell(statuses, number, 1)
                else:
                    if not pid:
                        return source, output
                    pids[number] = pid
                    try:
                        end = os.pidfd_open(pid)
                    except OSError:  # no descriptors are left
                        os.kill(pid, signal.SIGKILL)
                        _tell(statuses, number, os.waitstatus_to_exitcode(os.waitpid(pids.pop(number), 0)[1]))
                    else:
                        ends[end] = number
                        poll.register(end, select.POLLIN)
            else:  # no descriptors are left: the kernel has dropped them
                _tell(statuses, number, 1)
            for given in fds:
                os.close(given)


def _tell(statuses: int, number: int, code: int) -> None:
    try:
        os.write(statuses, STATUS.pack(number, code))
    except BrokenPipeError:
        pass  # the server is gone, as the next request shows
