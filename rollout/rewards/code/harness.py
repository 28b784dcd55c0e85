"""Harness around a solution in the sandbox. Sent as text in front of a call of one of these functions, so it needs
nothing but the standard library, of Python 3.9 or newer. No expected output of ``whole_program`` and ``function`` is
in the process, so there a solution has nothing to forge.
"""

import json
import os
import sys
import types

NAME = "<solution>"  # of the file, in tracebacks
# What LeetCode's Python has imported, whose starter code solutions of the function format repeat.
PRELUDE = """
from bisect import *; from collections import *; from functools import *; from heapq import *; from itertools import *
from math import *; from typing import *; from builtins import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
"""


def which_compiles(programs):
    """Print the index of the first one that Python compiles; -1 if there is none."""
    _silence(2)
    for index, text in enumerate(programs):
        try:
            compile(text, NAME, "exec", dont_inherit=True)
        except BaseException:  # a syntax error, null characters, nested too deeply, no memory left
            continue
        print(index)
        return
    print(-1)


def whole_program(text):
    """Run it as a script. Its errors go nowhere, so that the output is what it printed; the exit code tells of them."""
    _silence(2)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, NAME, "exec", dont_inherit=True), module.__dict__)


def function(text, name):
    """Call one of its functions, or a method of its class Solution, with the JSON values that standard input holds, one
    per line; print the result as JSON and nothing else. Does not return."""
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n") if line.strip()]
    stdout = _silence(1, 2)
    namespace = _loaded(PRELUDE, text)
    owner = namespace.get("Solution")
    found = getattr(owner(), name) if owner is not None and hasattr(owner, name) else namespace[name]
    result = json.dumps(found(*arguments), default=_plain, separators=(",", ":"))
    _write_and_exit(stdout, result)


def assertion(text, prefix, test, entry_point, marker):
    """Run a test of HumanEval's form: assertions, or a function ``check`` of them, over ``entry_point``, an expression.
    Prints ``marker`` and "passed" or "wrong". Does not return."""
    stdout = _silence(1, 2)
    namespace = _loaded(prefix, text)
    namespace["candidate"] = candidate = eval(entry_point, namespace) if entry_point else None
    namespace.pop("check", None)
    try:
        exec(test, namespace)
        if "check" in namespace:
            namespace["check"](candidate)
    except AssertionError:
        _write_and_exit(stdout, marker + "wrong")
    _write_and_exit(stdout, marker + "passed")


def _loaded(before, text):
    """The namespace of a module (not ``__main__``: what a script does at its end is not wanted)."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(before, module.__dict__)
    exec(compile(text, NAME, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value)  # NumPy's numbers and arrays


def _silence(*descriptors):
    """Send their output nowhere. Returns a copy of the first one as it was."""
    kept, nowhere = os.dup(descriptors[0]), os.open(os.devnull, os.O_WRONLY)
    for fd in descriptors:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    return kept


def _write_and_exit(fd, text):
    data = text.encode()
    while data:
        data = data[os.write(fd, data) :]
    os._exit(0)
