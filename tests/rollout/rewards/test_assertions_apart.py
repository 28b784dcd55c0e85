"""Assertions run in another process than the solution: what may cross, and solutions that cheat."""

import pytest

from rollout.rewards.code.solution_tests import TestOutcome

PASSED, WRONG, ERROR = TestOutcome.PASSED, TestOutcome.WRONG, TestOutcome.ERROR
CLOSE = {
    "import_prefix": "import math\n",
    "entry_point": "f",
    "test_code": "def check(candidate):\n    assert candidate(2) == 12345\n"
    "    assert abs(candidate(3) - 54321) < 1e-6\n"
    "    assert math.isclose(candidate(4), 98765)\n    assert all(x == 777 for x in [candidate(5)])\n",
}

CHEATS = {
    "equal to everything": "class A:\n    __eq__ = lambda self, other: True\n    __hash__ = None\ndef f(x): return A()",
    "a number equal to everything": (
        "class A(int):\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = lambda self, other: True\n"
        "    __sub__ = __rsub__ = __abs__ = lambda self, *other: self\n    __hash__ = int.__hash__\n"
        "def f(x): return A(1)"
    ),
    "everything is less": (
        "class A:\n    __eq__ = __lt__ = __gt__ = lambda self, other: True\n"
        "    __sub__ = __abs__ = __float__ = lambda self, *other: self\ndef f(x): return A()"
    ),
    "builtins": (
        "import builtins, math\nbuiltins.abs = lambda x: 0\nbuiltins.all = lambda x: True\n"
        "builtins.AssertionError = ValueError\nmath.isclose = lambda *a: True\nbuiltins.isinstance = lambda *a: True\n"
        "def f(x): return 1"
    ),
    "other names": "abs = all = lambda x: 0\nclass math:\n    isclose = lambda *a: True\ndef f(x): return 1",
    "its own check": "def check(candidate): pass\ncandidate = lambda x: 12345\ndef f(x): return 1",
    "prints the verdict": (
        "import os, sys\ndef f(x):\n    print('passed')\n    sys.__stdout__.write('passed')\n"
        "    sys.__stdout__.flush()\n"
        "    for fd in range(64):\n        try: os.write(fd, b'passed')\n        except OSError: pass\n    os._exit(0)"
    ),
    "exits when loaded": "import os\ndef f(x): return 1\nos._exit(0)",
    "SystemExit when loaded": "def f(x): return 1\nraise SystemExit(0)",
    "exits when called": "import os\ndef f(x): os._exit(0)",
    "exit() when called": "def f(x): exit()",
    "at exit": "import atexit, os\natexit.register(lambda: os.write(1, b'passed'))\ndef f(x): raise SystemExit(0)",
    "another encoder": (
        'import json, os\ndef f(x): return 1\njson.dumps = lambda *a, **k: \'[[["list", [1]], ["remote", [0]]]]\''
    ),
    "its own harness": (
        "import sys\nmain = sys.modules['__main__'].__dict__\nmain['_write_and_exit'] = lambda fd, text: None\n"
        "main['_Numbers'] = main['judge'] = None\ndef f(x): return 1"
    ),
    "finds the expected value": (
        "import gc, sys\ndef f(x):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen += [*frame.f_locals.values(), *frame.f_globals.values()]\n        frame = frame.f_back\n"
        "    said = repr(seen) + repr([o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))])\n"
        "    wanted = {2: 12346, 3: 54322, 4: 98766, 5: 778}[x] - 1\n"
        "    return wanted if f'== {wanted}' in said or f'- {wanted}' in said or f' {wanted})' in said else 0"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(name, bench):
    outcomes = bench.outcomes(CHEATS[name], CLOSE)
    assert len(outcomes) == 4 and PASSED not in outcomes
    assert bench.outcomes("def f(x): return [12345, 54321, 98765.0, 777][x - 2]", CLOSE) == [PASSED] * 4


LISTS = (
    "class Node:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = val, next\n"
    "def node(xs):\n    head = None\n    for x in reversed(xs): head = Node(x, head)\n    return head\n"
    "def values(n):\n    xs = []\n    while n: xs.append(n.val); n = n.next\n    return xs\n"
)
REVERSE = "def f(n):\n    last = None\n    while n: n.next, last, n = last, n, n.next\n    return last"
CLASS = "class Stack:\n    def __init__(self): self.xs = []\n    def push(self, x): self.xs.append(x)\n"
CLASS += "    def pop(self): return self.xs.pop()\n    size = property(lambda self: len(self.xs))"

HONEST = {
    "objects of the prefix": (REVERSE, "assert values(f(node([1, 2, 3]))) == [3, 2, 1]", LISTS),
    "a long chain of them": (REVERSE, "assert values(f(node(range(5000))))[0] == 4999", LISTS),
    "its own such class": (
        "class Node:\n    def __init__(self, val, next):\n        self.val, self.next = val, next\n"
        "def f(n): return Node(n.val + 1, None)",
        "assert values(f(node([1]))) == [2]",
        LISTS,
    ),
    "a cycle": ("def f(n): n.next = n; return n", "n = node([1])\nassert f(n) is n and n.next.next is n", LISTS),
    "in place": (
        "def f(xs): xs.sort()",
        "xs = [[3], [1]]\nlast = xs[0]\nf(xs)\nassert xs == [[1], [3]] and xs[1] is last",
        "",
    ),
    "keywords": ("def f(a, *, b): return a - b", "assert f(b=1, a=3) == 2", ""),
    "data": (
        "def f(x): return x",
        "for x in (None, True, 10**50, 1.5, float('inf'), '\\ud800ž\\n\\x1b[1m', (1, (2,)), {1, 2}, {(1, 2): [{}]},\n"
        "          frozenset([1])):\n"
        "    assert f(x) == x and type(f(x)) is type(x)",
        "",
    ),
    "numbers": (
        "from fractions import Fraction\nfrom collections import Counter\n"
        "def f(x): return [Fraction(x, 2), Counter('a')]",
        "assert f(1) == [0.5, {'a': 1}]",
        "",
    ),
    "an exception": (
        "def f(x): raise ValueError('no')",
        "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
        "",
    ),
    "an iterator": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]", ""),
    "objects of its own": (CLASS, "s = Stack()\ns.push(4)\ns.push(5)\nassert s.pop() == 5 and s.size == 1", ""),
    "false attributes": (CLASS, "assert not Stack().size", ""),
    "state": ("seen = []\ndef f(x): seen.append(x); return len(seen)", "assert [f(0), f(0), f(0)] == [1, 2, 3]", ""),
    "other functions": ("def g(x): return x + 1\ndef f(x): return g(x) - 2", "assert f(g(1)) == 1", ""),
    "chance": (
        "def f(x): return x",
        "import random\nfor _ in range(5):\n    x = random.random()\n    assert f(x) == x",
        "",
    ),
    "nothing of the solution": ("def f(x): return x", "assert True", ""),
    "math without import": ("import math\ndef f(x): return math.pi", "assert abs(f(1) - math.pi) < 1e-6", ""),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_tests_may_do(name, bench):
    program, test, prefix = HONEST[name]
    tests = {"test_code": test, "import_prefix": prefix, "entry_point": "f" if "def f" in program else ""}
    assert set(bench.outcomes(program, tests)) == {PASSED}
    assert PASSED not in bench.outcomes(f"{program}\n1 / 0", tests), "a solution that does not load passes nothing"


def test_what_goes_wrong_apart_from_the_answer(bench, monkeypatch):
    monkeypatch.setattr("rollout.rewards.code.solution_tests.CALLS", 5)

    def outcome(program, test):
        (found,) = bench.outcomes(program, {"test_code": test, "entry_point": "f"})
        return found

    assert outcome("def f(x): raise AssertionError", "assert f(1)") == WRONG
    assert outcome("def f(x): return 1", "assert f(1) + nowhere(2)") == ERROR
    assert outcome("def f(x): return 1", "assert f(lambda: 3)") == ERROR, "a function cannot be given"
    assert outcome("def f(x): return 0", "while True:\n    if f(1): raise ValueError") == TestOutcome.TIMEOUT
    long = "def check(candidate):\n    assert candidate(candidate('a') * 2) == 'b'"
    assert outcome("def f(x): return 'z' * 600_000", long) == ERROR, "the judge's question would quote it twice"
