"""Harness around a solution in the sandbox.

One of these functions is sent as text in front of its call, with its helpers, so this file uses only the standard
library of Python 3.9 or newer. No process with a solution holds an expected output, so a solution has nothing to forge.

``as_main`` and ``calls`` follow LiveCodeBench's checker (lcb_runner/evaluation/testing_util.py: grade_stdio,
grade_call_based, MockStdinWithBuffer, reliability_guard), ``whole_program`` and ``function`` SOD's released checker
(``as_released`` of ``CodeTests``). ``judge`` and ``answer`` are the two processes of an assertion.
"""

import ast
import builtins
import io
import json
import os
import random
import sys
import types

NAME = "<solution>"  # file name in tracebacks
# Both checkers put these before a solution. The order matters: later names hide earlier ones.
MODULES = """string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys
json"""
IMPORTS = "\n".join(
    [f"from {name} import *" for name in [*MODULES.split(), "builtins", "typing"]]
    + [f"import {', '.join(MODULES.split())}\n"]
)
CHECKER = IMPORTS + "sys.setrecursionlimit(50000)\n\n"  # LiveCodeBench's
# LiveCodeBench takes these away from a solution:
NO_MODULES = "ipdb joblib resource psutil tkinter"
NO_BUILTINS = "quit help"
NO_OS = """chdir chmod chown chroot fchdir fchmod fchown fork forkpty getcwd kill killpg lchmod lchown putenv remove
removedirs rename renames replace rmdir setuid system truncate unlink"""


def compiles(text, form, name):
    """Print 1 if a solution compiles as the harness function ``form`` runs it, else 0. For SOD's checker it only has to
    parse, with a function called ``name`` if there is no class Solution."""
    _silence(2)
    try:
        if form in ("whole_program", "function"):
            ast.parse(_as_method(text, name) if form == "function" else text)
        else:
            make = {"as_main": _main_function, "calls": CHECKER.__add__}.get(form, str)
            compile(make(text), NAME, "exec", dont_inherit=True)
    except BaseException:  # a syntax error, null characters, nested too deeply, no memory left, no such function
        print(0)
    else:
        print(1)


def as_main(text):
    """Run a script as LiveCodeBench does: as the body of a function, not in ``__main__``, with a stand-in for standard
    input. The output is its text in ``sys.stdout``, however it exits; an exception is a failure. Does not return."""
    given = sys.stdin.buffer.read().decode("utf-8", "replace")
    stdout, run = _as_checked(_main_function(text), "main_function")
    # for modules that imported stdin before the solution began (from sys import stdin)
    lines, early = iter(given.split("\n")), sys.stdin
    early.read, early.readline, early.readlines = lambda *_: given, lambda *_: next(lines), lambda *_: given.split("\n")
    written = io.StringIO()
    written.close = lambda _: None  # pyright: ignore[reportAttributeAccessIssue]  # close() is a TypeError there
    sys.stdin, sys.stdout = _Stdin(given), written
    try:
        run()
    except SystemExit:
        pass
    _write(stdout, written.getvalue())
    os._exit(0)


def _main_function(text):
    """Return a module's source with a script's statements, except imports, in a function ``main_function``. A last ``if
    __name__ == "__main__"`` counts as its body; any other is false."""
    body = ast.parse(text).body
    if body and isinstance(body[-1], ast.If) and ast.unparse(body[-1].test) == "__name__ == '__main__'":
        body[-1:] = body[-1].body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    function = ast.parse("def main_function(): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [node for node in body if node not in imports]
    return CHECKER + ast.unparse(ast.Module([*imports, function], []))


class _Stdin:
    """Stand-in for standard input as in LiveCodeBench: ``read`` and ``readlines`` always return all of it, and it is
    not iterable. Its bytes are all of it, or its first line again and again."""

    def __init__(self, given):
        self._rest, data = io.StringIO(given), given.encode()
        self.read, self.readlines = lambda *_: given, lambda *_: given.split("\n")
        self.buffer = types.SimpleNamespace(read=lambda *_: data, readline=lambda *_: data.split(b"\n")[0] + b"\n")

    def __getattr__(self, name):
        return getattr(self._rest, name)


def calls(text, name, longest):
    """Call a solution's function, or a method of one Solution, once per input in one module, so that its state stays.
    Does not return.

    Standard input: a line with the lengths of the inputs in characters, then the inputs, with one JSON argument per
    line. Prints a line once the solution is loaded, then one per result: JSON, an empty line if no JSON equals the
    result or it has more than ``longest`` characters, or "error" for an exception.
    """
    sizes, _, given = sys.stdin.buffer.read().decode("utf-8", "replace").partition("\n")
    stdout, found = _as_checked(CHECKER + text, name)
    _write(stdout, "\n")
    end = 0
    for size in map(int, sizes.split()):
        end += size
        try:
            result = found(*(json.loads(line) for line in given[end - size : end].split("\n") if line.strip()))
            said = _as_json(result)
        except BaseException:
            said = "error"
        _write(stdout, (said if len(said) <= longest else "") + "\n")
    os._exit(0)


def _as_json(value):
    """Return JSON text that equals ``value`` by Python's rules (a tuple may be a list), or "" if there is none."""
    try:
        return json.dumps(_comparable(list(value) if isinstance(value, tuple) else value))
    except (TypeError, ValueError, OverflowError):
        return ""


def _comparable(value):
    if getattr(value, "shape", None) == ():
        value = value.item()  # NumPy's numbers
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, list):
        return [_comparable(one) for one in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError
        return {key: _comparable(one) for key, one in value.items()}
    for kind in (int, float):  # fractions, decimals
        if kind(value) == value:
            return kind(value)
    raise TypeError


def _as_checked(source, name):
    """Run a module as LiveCodeBench does: without standard input, without some functions, and not importable.

    Returns a copy of standard output, which is closed to the module, and the function called ``name``. With the text
    "class Solution" in the source it must be a method of such a class at the top of the module, so a script with that
    text fails.
    """
    stdout, nowhere = _silence(1, 2), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    sys.stdin = open(0, closefd=False)
    for owner, names in ((os, NO_OS), (builtins, NO_BUILTINS)):
        for taken in names.split():
            setattr(owner, taken, None)
    for taken in NO_MODULES.split():
        sys.modules[taken] = None  # pyright: ignore[reportArgumentType]  # so that it is not found
    module = types.ModuleType("tmp_sol")
    exec(compile(source, NAME, "exec", dont_inherit=True), module.__dict__)
    return stdout, getattr(module.Solution() if "class Solution" in source else module, name)


def whole_program(text):
    """Run a solution as a script, and drop what it writes to stderr. Its output is then what it printed; the exit code
    shows failures."""
    _silence(2)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(text, NAME, "exec", dont_inherit=True), module.__dict__)


def function(text, name):
    """Run a script, then call the function ``name`` that it imported or defined, or that method of its class Solution.

    Arguments: the rest of standard input, one JSON value per line. Prints the result: lists, dictionaries, tuples, None
    and booleans as JSON, other values by ``str``. If the call raises, prints nothing and exits with code 0.
    """
    whole_program(IMPORTS + _as_method(text, name))
    names, given = sys.modules["__main__"].__dict__, sys.stdin.read()
    try:
        arguments = [json.loads(line) for line in given.split("\n")] if given.strip() else []
        result = (names[name] if name in names else getattr(names["Solution"](), name))(*arguments)
    except Exception:
        return
    as_json = result is None or isinstance(result, (bool, dict, list, tuple))
    print(json.dumps(result) if as_json else result)


def _as_method(text, name):
    """Move the function ``name`` of a solution's source into a class Solution at the end, as a method, and return the
    new source. Returns the source unchanged if it contains "class Solution"."""
    if "class Solution" in text:
        return text
    module, solution = ast.parse(text), ast.parse("class Solution: ...").body[0]
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    parameters = functions[-1].args.args
    if not (parameters and parameters[0].arg == "self"):
        parameters.insert(0, ast.arg("self"))
    solution.body = functions[-1:]  # pyright: ignore[reportAttributeAccessIssue]
    module.body = [*(node for node in module.body if node not in functions), solution]
    return ast.unparse(module)


def judge():
    """Run a test of HumanEval's form: assertions, or a function ``check`` of them, over the expression ``entry_point``.

    The solution is in another process. A call of it prints the question and ends this process; the test then runs again
    with the answers so far. Standard input: JSON of prefix, test, entry point, answers. Prints "passed", "wrong", or
    JSON: the next question. Does not return.
    """
    prefix, test, entry_point, answers = json.load(sys.stdin)
    random.seed(0)  # a test makes the same calls each time
    names = _Names(_silence(1, 2), answers)
    names.known = _classes_of(prefix, names)
    names["candidate"] = candidate = _Remote(names, [entry_point])
    if entry_point.isidentifier():
        names[entry_point] = candidate
    try:
        exec(test, names)
        if "check" in names:
            names["check"](candidate)
    except AssertionError:
        _write_and_exit(names.stdout, "wrong")
    _write_and_exit(names.stdout, "passed")


class _Names(dict):
    """Namespace of a test. Names that neither the test nor Python defines belong to the solution."""

    def __init__(self, stdout, answers):
        self.stdout, self.answers, self.asked, self.known = stdout, answers, 0, {}
        super().__init__(__name__="solution")

    def __missing__(self, name):
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        return __import__(name) if name in MODULES.split() else _Remote(self, [name])

    def ask(self, what, path, arguments):
        """Ask the solution's process, and return its answer. Lists, dictionaries, sets and objects among the arguments
        change as the solution changed them. Raises the solution's exception."""
        numbers = _Numbers(self.known)
        nodes = numbers.nodes([arguments])
        if self.asked == len(self.answers):
            _write_and_exit(self.stdout, json.dumps([what, path, nodes]))
        answer = self.answers[self.asked]
        self.asked += 1
        if isinstance(answer[0], str):
            error = getattr(builtins, answer[0], None)
            if isinstance(error, type) and issubclass(error, Exception):
                raise error(answer[1])
            raise RuntimeError(answer[1])
        mutable = _mutable(nodes, numbers.values)
        return _made(answer, self.known, lambda path: _Remote(self, path), mutable)[0]


class _Remote:
    """Stand-in for a function or object in the solution's process that is not data. ``path``: a name, or the number of
    a value in an earlier answer, then attributes. It equals a value only if its data does."""

    def __init__(self, names, path):
        self.names, self.path = names, path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Remote(self.names, [*self.path, name])

    def __call__(self, *args, **kwargs):
        return self.names.ask("call", self.path, [args, kwargs])

    def __iter__(self):
        return iter(self.names.ask("list", self.path, []))

    def _data(self):
        return self.names.ask("get", self.path, [])

    def __eq__(self, other):
        data = self._data()
        return not isinstance(data, _Remote) and data == other

    def __bool__(self):
        data = self._data()
        return isinstance(data, _Remote) or bool(data)

    __hash__ = object.__hash__


def answer(text):
    """Run a solution, and answer the questions of ``judge`` about it. Standard input: JSON of prefix, entry point,
    questions. Prints JSON: for each question nodes of the result and the changed arguments, or name and text of the
    exception. Does not return."""
    prefix, entry_point, questions = json.load(sys.stdin)
    stdout = _silence(1, 2)
    module = sys.modules["solution"] = types.ModuleType("solution")
    names = module.__dict__
    known = _classes_of(prefix, names)
    exec(compile(text, NAME, "exec", dont_inherit=True), names)
    known = {name: names[name] for name in known}  # the solution may have redefined them
    found_before = {entry_point: eval(entry_point, names)} if entry_point else {}
    kept, answers = [], []

    def found(path):
        root = path[0]
        value = (
            kept[root] if isinstance(root, int) else found_before[root] if root in found_before else eval(root, names)
        )
        for name in path[1:]:
            value = getattr(value, name)
        return value

    def keep(value):
        kept.append(value)
        return [len(kept) - 1]

    def answered(what, path, arguments):
        value = found(path)
        if what == "call":
            return value(*arguments[0], **arguments[1])
        return list(value) if what == "list" else value

    for what, path, nodes in questions:
        made = []
        (arguments,) = _made(nodes, known, found, (), made)
        try:
            result = answered(what, path, arguments)
        except BaseException as error:
            answers.append([type(error).__name__, str(error)])
        else:
            answers.append(_Numbers(known, keep).nodes([result, *_mutable(nodes, made)]))
    _write_and_exit(stdout, json.dumps(answers))


def _classes_of(prefix, names):
    """Run the code ``prefix``, and return the classes that it defines, by name."""
    exec(prefix, names)
    return {name: value for name, value in names.items() if isinstance(value, type) and value.__module__ == "solution"}


def _mutable(nodes, values):
    """Return the mutable ``values`` (list, dict, set, object), which a function may have changed. They are in the order
    of ``nodes`` without the first node."""
    kinds = [node[0] for node in nodes[1:]]
    return [value for index, value in enumerate(values) if kinds[index] in ("list", "dict", "set", "object")]


class _Numbers:
    """Converts data to numbered nodes (kind, content), so that one object stays one object, cycles included. Content
    refers to nodes by number. The first node lists the requested values."""

    def __init__(self, known, keep=None):
        self.known, self.keep, self.values, self.seen = known, keep, [], {}

    def nodes(self, values):
        self._number(values)
        found = [self._node(value) for value in self.values]  # the list grows meanwhile
        del self.values[0]
        return found

    def _number(self, value):
        if id(value) not in self.seen:
            self.seen[id(value)] = len(self.values)
            self.values.append(value)
        return self.seen[id(value)]

    def _node(self, value):
        if isinstance(value, _Remote):
            return ["remote", value.path]
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return ["data", kind(value)]
        if value is None:
            return ["data", None]
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return [kind.__name__, [*map(self._number, value)]]
        if isinstance(value, dict):
            return ["dict", self._pairs(value)]
        if self.known.get(type(value).__name__) is type(value) and hasattr(value, "__dict__"):
            return ["object", self._pairs(vars(value)), type(value).__name__]
        try:
            return ["data", _comparable(value)]  # other numbers
        except (TypeError, ValueError, OverflowError):
            if self.keep is None:
                raise TypeError(f"a test gave a solution a {type(value).__name__}, which is not data") from None
            return ["remote", self.keep(value)]

    def _pairs(self, held):
        return [[self._number(key), self._number(one)] for key, one in dict.items(held)]


def _made(nodes, known, remote, mutable, made=None) -> list:
    """Rebuild and return the values that nodes of ``_Numbers`` describe. The last ``len(mutable)`` values are those in
    ``mutable``, updated in place. All objects are appended to ``made``, in order of nodes."""
    first = nodes[0][1]
    there = dict(zip(first[len(first) - len(mutable) :], mutable))  # noqa: B905  # as in Python 3.9
    built, todo = {}, []

    def build(number):
        if number in built:
            return built[number]
        kind, held, *name = nodes[number]
        if kind == "data":
            value = held
        elif kind == "remote":
            value = remote(held)
        elif kind in ("tuple", "frozenset"):
            value = {"tuple": tuple, "frozenset": frozenset}[kind](map(build, held))
        else:
            empty = (
                object.__new__(known[name[0]]) if kind == "object" else {"list": list, "dict": dict, "set": set}[kind]()
            )
            value = there.get(number, empty)
            todo.append((kind, held, value))
        built[number] = value
        return value

    wanted = [build(number) for number in first[: len(first) - len(mutable)]]
    for number in there:
        build(number)
    for kind, held, value in todo:  # the list grows meanwhile
        value = vars(value) if kind == "object" else value
        filled = [(build(key), build(one)) for key, one in held] if kind in ("dict", "object") else [*map(build, held)]
        value.clear()
        (value.extend if kind == "list" else value.update)(filled)
    if made is not None:
        made += [build(number) for number in range(1, len(nodes))]
    return wanted


def _silence(*descriptors):
    """Discard the output of file descriptors. Returns a copy of the first one as it was."""
    kept, nowhere = os.dup(descriptors[0]), os.open(os.devnull, os.O_WRONLY)
    for fd in descriptors:
        os.dup2(nowhere, fd)
    os.close(nowhere)
    return kept


def _write(fd, text):
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(fd, data) :]


def _write_and_exit(fd, text):
    _write(fd, text)
    os._exit(0)
