"""A program finds nothing of another trajectory's program or output: not in its frames, objects or memory, not of one
that runs meanwhile, and not of one that has ended."""

import asyncio
import re
import uuid

import pytest

from rollout.trajectory import CallOutcome

MARK = r"c4nary-[0-9a-f]{32}"  # does not match itself, so it can stand in the programs that search
HEADER = f"""
import re
planted = "c4nary-" + "0" * 32
patterns = re.compile({MARK!r}), re.compile({MARK!r}.encode())
found = set()

def look(value):
    if isinstance(value, str):
        found.update(patterns[0].findall(value))
    elif isinstance(value, (bytes, bytearray)):
        found.update(text.decode() for text in patterns[1].findall(bytes(value)))
"""
FRAMES = """
import sys
waiting, seen, depth = [], set(), 0
frame = sys._getframe()
while frame:
    waiting += [frame.f_locals, frame.f_globals, frame.f_code]
    frame, depth = frame.f_back, depth + 1
"""
OBJECTS = """
import gc, sys
waiting, seen = [*gc.get_objects(), *sys.modules.values(), sys._getframe()], set()
for o in gc.get_objects():
    waiting += gc.get_referrers(o) if len(waiting) < 30_000 else []
"""
REACHABLE = """
import gc
keep = []
while waiting:
    value = waiting.pop()
    if id(value) in seen or value is waiting or value is keep or value is seen:
        continue
    seen.add(id(value))
    keep.append(value)
    look(value)
    if not isinstance(value, (str, bytes, bytearray, int, float)):
        waiting += gc.get_referents(value)
print(len(seen), *found)
"""
# write(2) says EFAULT for an address where nothing is mapped, so memory can be searched without being killed for it
MEMORY = """
import ctypes, gc, os
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
here, there = os.pipe()
PAGE = 4096
pages = set()

def page(address):
    if libc.write(there, ctypes.c_void_p(address), ctypes.c_size_t(PAGE)) != PAGE:
        return None
    return os.read(here, PAGE)

def search(address, step):
    # from here until nothing is mapped; a mark may lie across two pages
    before = b""
    while address not in pages and (data := page(address)) is not None:
        pages.add(address)
        look(before[-64:] + data if step > 0 else data + before[:64])
        before, address = data, address + step

seeds = {id(o) & -PAGE for o in gc.get_objects()} | {id(v) & -PAGE for v in vars(os).values()}
local = ctypes.create_string_buffer(16)
stdout = ctypes.c_int.in_dll(libc, "stdout")  # any of the C library's own
seeds |= {address & -PAGE for address in (ctypes.addressof(local), libc.sbrk(0) - PAGE, ctypes.addressof(stdout))}
for seed in seeds:
    search(seed, PAGE)
    search(seed - PAGE, -PAGE)
print(len(pages), *found)
"""
ATTACKS = {
    "frames": HEADER + FRAMES + REACHABLE,
    "objects": HEADER + OBJECTS + REACHABLE,
    "memory": HEADER + MEMORY,
}


@pytest.fixture(
    scope="module",
    params=[("namespaces", "landlock", "seccomp"), pytest.param(("landlock", "seccomp"), marks=pytest.mark.slow)],
    ids=["namespaces", "landlock"],
)
def bench(request, make_bench):
    bench = make_bench(timeout_s=60, warm=0, mechanisms=request.param)
    try:
        bench.do(bench.sandbox.start())
    except RuntimeError as error:
        pytest.skip(f"these cannot confine here: {error}")
    return bench


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_of_another_program_is_to_be_found(name, bench):
    def mark():
        return f"c4nary-{uuid.uuid4().hex}"

    async def scenario():
        ended = await bench.tool.call({"code": f"print('{mark()}' * 100)"})
        assert ended.outcome is CallOutcome.OK
        code = f"print('{mark()}', flush=True)\nimport time\ntime.sleep(1000)"
        running = asyncio.create_task(bench.tool.call({"code": code}))
        await asyncio.sleep(0)  # it is sent first, and orders are obeyed one after the other
        found = await bench.tool.call({"code": ATTACKS[name]})
        assert not running.done()
        running.cancel()
        return found

    result = bench.do(scenario())
    assert result.outcome is CallOutcome.OK, result.text
    count, *marks = result.text.split()
    assert marks == ["c4nary-" + "0" * 32], "the one that the program made itself, which shows that it can find them"
    assert re.fullmatch(MARK, marks[0]) and int(count) > 300, "of objects or pages"


def test_no_frame_of_the_server_is_above_a_program(bench):
    code = "import sys\nframe, names = sys._getframe(), []\nwhile frame:\n    names.append((frame.f_code.co_name))\n"
    text = bench.run(code + "    frame = frame.f_back\nprint(names)").text
    assert eval(text) == ["<module>", "execute", "run", "<module>"]
