"""Seccomp filter: the list of allowed system calls, in classic BPF; all others fail with EPERM.

Left out on purpose: starting processes and other programs, sockets other than a connected pair (asyncio's wake-up),
prctl, ptrace, namespaces, mounts, io_uring, bpf, keys, shared memory by System V or memfd, inotify, priorities, limits.
"""

import ctypes
import errno
import os
import struct

import linux

AUDIT_ARCH_X86_64 = 0xC000003E
SECCOMP_ALLOW, SECCOMP_ERRNO, SECCOMP_KILL = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
CLONE_THREAD = 0x00010000
AF_UNIX = 1
# asking whether a file is a terminal, its size, bytes waiting; non-blocking; close on exec
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# duplicate, flags, who holds a lock, size of a pipe; not who gets signals (F_SETOWN, F_SETSIG), which reach others
FCNTLS = (0, 1, 2, 3, 4, 5, 1030, 1031, 1032)
# F_SETLK, F_SETLKW: each lock is kernel memory that no limit counts. Locks exclude other processes, and a program is
# alone with its files, so they may report success without locking; sqlite3 needs the answer.
LOCKS = (6, 7)
# Landlock does not cover these: a program could change modes and times of files that it cannot open
METADATA = frozenset({"chmod", "fchmod", "fchmodat", "utimes", "futimesat", "utimensat", "truncate"})

ALLOWED = """
read 0 write 1 open 2 close 3 stat 4 fstat 5 lstat 6 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12
rt_sigaction 13 rt_sigprocmask 14 rt_sigreturn 15 pread64 17 pwrite64 18 readv 19 writev 20 access 21 pipe 22 select 23
sched_yield 24 mremap 25 msync 26 mincore 27 madvise 28 dup 32 dup2 33 pause 34 nanosleep 35 getitimer 36 alarm 37
setitimer 38 getpid 39 sendfile 40 recvfrom 45 shutdown 48 getsockname 51 getpeername 52 getsockopt 55 exit 60 uname 63
flock 73 fsync 74 fdatasync 75 truncate 76 ftruncate 77 getdents 78 getcwd 79 chdir 80 fchdir 81 rename 82
mkdir 83 rmdir 84 creat 85 link 86 unlink 87 symlink 88 readlink 89 chmod 90 fchmod 91 umask 95 gettimeofday 96
getrlimit 97 getrusage 98 times 100 getuid 102 getgid 104 geteuid 107 getegid 108 getppid 110 getpgrp 111 getgroups 115
sigaltstack 131 statfs 137 fstatfs 138 gettid 186 time 201 futex 202 sched_getaffinity 204 getdents64 217
set_tid_address 218 restart_syscall 219 fadvise64 221 clock_gettime 228 clock_getres 229 clock_nanosleep 230
exit_group 231 epoll_wait 232 epoll_ctl 233 utimes 235 openat 257 mkdirat 258 futimesat 261 newfstatat 262 unlinkat 263
renameat 264 linkat 265 symlinkat 266 readlinkat 267 fchmodat 268 faccessat 269 pselect6 270 ppoll 271
set_robust_list 273 utimensat 280 epoll_pwait 281 eventfd 284 fallocate 285 eventfd2 290 epoll_create1 291 dup3 292
pipe2 293 preadv 295 pwritev 296 getcpu 309 renameat2 316 getrandom 318 membarrier 324 copy_file_range 326 preadv2 327
pwritev2 328 statx 332 rseq 334 close_range 436 openat2 437 faccessat2 439 epoll_pwait2 441
"""


def allowed() -> dict[str, int]:
    words = ALLOWED.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def _statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


_YES, _NO = _statement(RETURN, SECCOMP_ALLOW), _statement(RETURN, SECCOMP_ERRNO | errno.EPERM)
_DONE = _statement(RETURN, SECCOMP_ERRNO | 0)  # returns 0 and does nothing


def _on(number: int, *body: bytes) -> bytes:
    """Return seccomp filter code that runs ``body``, which must return, if the system call is ``number``. For other
    calls the filter continues behind this code, with their number still loaded."""
    return _statement(JUMP_EQUAL, number, 0, len(body)) + b"".join(body)


def _argument(index: int, high: bool = False) -> bytes:
    return _statement(LOAD, 16 + 8 * index + 4 * high)


def _any_of(*values: int, answer: bytes = _YES) -> list[bytes]:
    return [part for value in values for part in (_statement(JUMP_EQUAL, value, 0, 1), answer)] + [_NO]


def build(pid: int, threads: bool, metadata: bool) -> bytes:
    """Return the seccomp filter for the process ``pid`` as bytes: signals reach only the process itself."""
    parts = [
        _statement(LOAD, 4),  # architecture: another one has other numbers
        _statement(JUMP_EQUAL, AUDIT_ARCH_X86_64, 1, 0),
        _statement(RETURN, SECCOMP_KILL),
        _statement(LOAD, 0),  # number of the system call
    ]
    parts += [_on(number, _YES) for name, number in allowed().items() if metadata or name not in METADATA]
    parts += [
        _on(16, _argument(1), *_any_of(*IOCTLS)),
        _on(72, _argument(1), *_any_of(*LOCKS, answer=_DONE)[:-1], *_any_of(*FCNTLS)),
        # send() on a connected pair: without an address, which could name a foreign socket
        _on(44, _argument(4), _statement(JUMP_EQUAL, 0, 1, 0), _NO, _argument(4, high=True), *_any_of(0)),
        _on(53, _argument(0), *_any_of(AF_UNIX)),
        _on(62, _argument(0), *_any_of(pid)),  # kill
        _on(234, _argument(0), *_any_of(pid)),  # tgkill
        # prlimit64: reading the process's limits only
        _on(
            302,
            *(_argument(0), _statement(JUMP_EQUAL, 0, 2, 0), _statement(JUMP_EQUAL, pid, 1, 0), _NO),
            *(_argument(2), _statement(JUMP_EQUAL, 0, 1, 0), _NO, _argument(2, high=True), *_any_of(0)),
        ),
        _on(435, _statement(RETURN, SECCOMP_ERRNO | errno.ENOSYS)),  # clone3 hides its flags; the C library uses clone
    ]
    if threads:
        parts.append(_on(56, _argument(0), _statement(JUMP_SET, CLONE_THREAD, 0, 1), _YES, _NO))
    return b"".join([*parts, _NO])


def available() -> bool:
    """Return whether the kernel accepts seccomp filters, and the processor has the system call numbers of this file."""
    if os.uname().machine != "x86_64":
        return False
    linux.libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT  # the filter was wanted


def enter(pid: int, threads: bool, metadata: bool) -> None:
    """Apply the seccomp filter to this thread and all that it starts. Needs no_new_privs."""
    code = build(pid, threads, metadata)
    program = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
    if linux.libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp filter refused")
