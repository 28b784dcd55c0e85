"""Programs that want out: each is contained, nobody else is harmed, nothing is left, and the model reads why."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from experiments.registry.project import ROOT
from rollout.tools.python.base import readable
from tests.processes import gone_within
from tests.rollout.tools.conftest import descendants
from tests.rollout.tools.hostile_programs import ALL, ERROR, FILES, OK

SECRET_TEXT = "k3y-that-nobody-may-read"
BREACH = "the door is open"
WARM = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What is there to be stolen or broken, by the names that the programs use."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text(SECRET_TEXT)
    victim = subprocess.Popen(["sleep", "600"])
    listener = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract.bind(f"\0sandbox-test-{os.getpid()}")
    listener.setblocking(False)
    abstract.setblocking(False)
    names = {
        "SECRET": str(folder / "secret"),
        "CANARY": str(folder / "canary"),
        "TRAINER": os.getpid(),
        "VICTIM": victim.pid,
        "HOME": str(Path.home()),
        "PROJECT": str(ROOT),
        "VENV": f"{sys.prefix}/pyvenv.cfg",
        "PORT": listener.getsockname()[1],
        "BREACH": BREACH,
        "ABSTRACT": f"sandbox-test-{os.getpid()}",
    }
    yield names, victim, listener, abstract
    victim.kill()
    victim.wait()
    listener.close()
    abstract.close()


@pytest.fixture(scope="module")
def benches(make_bench):
    """One for what only the deadline ends, one that has time on a busy machine."""
    os.environ["SANDBOX_TEST_SECRET"] = SECRET_TEXT
    yield {True: make_bench(timeout_s=0.6, warm=WARM), False: make_bench(timeout_s=20, memory_mb=256, warm=WARM)}
    del os.environ["SANDBOX_TEST_SECRET"]


@pytest.fixture(scope="module")
def threads_before() -> int:
    """Other tests of this process may have left some."""
    return threading.active_count()


@pytest.mark.parametrize("name", ALL)
def test_contained(name, world, benches, threads_before):
    hostile, (names, victim, listener, abstract) = ALL[name], world
    bench = benches[hostile.endless]
    header = "; ".join(f"{key} = {value!r}" for key, value in names.items())
    result = bench.run(f"{header}\n{hostile.code}")

    assert result.outcome is hostile.outcome, result
    assert re.search(hostile.says, result.text), result.text
    assert BREACH not in result.text and SECRET_TEXT not in result.text
    assert result.text.strip() and len(result.text) < 11_000
    assert readable(result.text) == result.text
    assert str(ROOT) not in re.sub(r"attempt.*|[^\n]*PROJECT.*", "", result.text), "no folder of ours in tracebacks"
    # nobody else is harmed
    assert not os.path.exists(names["CANARY"]) and Path(names["SECRET"]).read_text() == SECRET_TEXT
    assert victim.poll() is None
    for sink in (listener.accept, lambda: abstract.recv(10)):
        with pytest.raises(BlockingIOError):
            sink()
    # the server is the same one, with none but its zygote and warm interpreters, and works
    monitor, seconds = bench.monitor, bench.sandbox.timeout_s
    bench.sandbox.timeout_s = 20  # time enough on a busy machine
    assert bench.run("6 * 7").text == "42" and bench.monitor == monitor
    bench.sandbox.timeout_s = seconds
    deadline = time.monotonic() + 300
    while len(descendants(monitor)) > 2 + WARM and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(descendants(monitor)) <= 2 + WARM
    assert threading.active_count() < threads_before + 20


@pytest.fixture(scope="module")
def without_mounts(make_bench):
    """As on machines that allow no namespaces."""
    if not any(line.startswith("Seccomp") for line in Path("/proc/self/status").read_text().splitlines()):
        pytest.skip("no seccomp")
    try:
        bench = make_bench(timeout_s=20, mechanisms=("landlock", "seccomp"))
        bench.do(bench.sandbox.start())
    except RuntimeError as error:
        pytest.skip(f"no Landlock: {error}")
    return bench


ELSEWHERE = ("symbolic links", "fill the disk", "fill the disk with many files", "sparse file", "chroot")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name not in ELSEWHERE])
def test_files_are_out_of_reach_without_mounts_too(name, world, without_mounts):
    names = world[0]
    header = "; ".join(f"{key} = {value!r}" for key, value in names.items())
    result = without_mounts.run(f"{header}\n{FILES[name].code}")
    assert result.outcome is FILES[name].outcome
    assert BREACH not in result.text and SECRET_TEXT not in result.text
    assert not os.path.exists(names["CANARY"])


WRITES = "os.symlink(SECRET, '/tmp/link')", "open('x', 'w')", "os.utime(SECRET)", "os.chmod(SECRET, 0)"


@pytest.mark.slow
@pytest.mark.parametrize("code", [*WRITES, "os.truncate(SECRET, 0)", "os.unlink(SECRET)", "os.rename(SECRET, 'y')"])
def test_nothing_can_be_written_without_mounts(code, world, without_mounts):
    secret = world[0]["SECRET"]
    before = os.stat(secret)
    result = without_mounts.run(f"import os; SECRET = {secret!r}\n{code}")
    assert result.outcome is ERROR and "PermissionError" in result.text
    assert os.stat(secret) == before
    assert not os.path.lexists("/tmp/link")


def test_programs_leave_nothing_to_each_other(benches):
    bench = benches[False]
    first = "import os, math, tempfile\nmath.pi = 3\nopen('left', 'w').write('x')\nprint(os.getcwd())"
    assert bench.run(first).outcome is OK
    for _ in range(WARM + 2):
        assert bench.run("import os, math\nprint(os.listdir('.'), math.pi > 3.1)").text == "[] True"


def test_closing_leaves_no_process_and_no_file(make_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of its own: in the usual one other tests start sandboxes
    bench = make_bench(timeout_s=30)
    bench.do(bench.sandbox.start())
    monitor = bench.monitor
    running = bench.loop.create_task(bench.tool.call({"code": "while True: pass"}))
    while not running.done() and len(descendants(monitor)) < 3:
        bench.do(asyncio.sleep(0.01))
    everyone = [monitor, *descendants(monitor)]
    bench.do(bench.sandbox.close())
    with pytest.raises(RuntimeError, match="closed"):
        bench.do(running)
    assert not [pid for pid in everyone if os.path.exists(f"/proc/{pid}")]
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_nothing_outlives_a_trainer_that_is_killed():
    code = (
        "import asyncio, os\nfrom rollout.tools.python.local import LocalSandbox\n"
        "async def main():\n    sandbox = LocalSandbox(timeout_s=100)\n    await sandbox.start()\n"
        "    task = asyncio.create_task(sandbox.run('while True: pass'))\n    await asyncio.sleep(0.05)\n"
        "    print(sandbox._server.process.pid, flush=True)\n    await task\nasyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        monitor = int(trainer.stdout.readline())
        deadline = time.monotonic() + 300
        while len(everyone := [monitor, *descendants(monitor)]) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        trainer.kill()
    assert all(gone_within(pid) for pid in everyone)


HEADERS = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")]
NEVER = (
    "fork vfork clone clone3 execve execveat ptrace process_vm_readv process_vm_writev prctl unshare setns mount "
    "umount2 pivot_root chroot socket connect bind sendmsg recvmsg bpf io_uring_setup io_uring_enter keyctl add_key "
    "perf_event_open userfaultfd memfd_create shmget mknod mknodat setuid setresuid capset seccomp tkill pidfd_open "
    "rt_sigqueueinfo rt_tgsigqueueinfo timer_create inotify_init1 setpriority sched_setaffinity setrlimit kexec_load"
)


@pytest.mark.slow
def test_the_numbers_of_system_calls_are_the_kernels():
    header = next((path for path in HEADERS if path.exists()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    real = {n: int(v) for n, v in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import seccomp; print(json.dumps(seccomp.allowed()))"
    folder = ROOT / "rollout/tools/python/sandbox_runtime"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    allowed = json.loads(done.stdout)
    assert {name: real[name] for name in allowed} == allowed
    assert not {real[name] for name in NEVER.split()} & set(allowed.values())
    conditional = {"ioctl": 16, "sendto": 44, "socketpair": 53, "kill": 62, "fcntl": 72, "tgkill": 234}
    conditional |= {"prlimit64": 302, "clone": 56, "clone3": 435}
    assert {name: real[name] for name in conditional} == conditional
