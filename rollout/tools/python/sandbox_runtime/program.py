"""Runs one program: its last expression is printed, its tracebacks are short.

The local sandbox uses this file in the confined process, and it is sent in front of the program to SandboxFusion. So it
needs only the standard library, of Python 3.9 or newer. Programs are parsed here and not in the trainer, because a
program can crash the parser.
"""

import ast
import atexit
import io
import linecache
import os
import site
import sys
import threading
import traceback
import types

NAME = "<program>"  # of the file, in tracebacks
FRAMES = 6  # of a traceback, the innermost
LIBRARY = f"python{sys.version_info[0]}.{sys.version_info[1]}{os.sep}"


def with_echo(source: str) -> ast.Module:
    """Parse a program so that its last statement is passed to ``sys.displayhook`` if that is an expression. Raises
    SyntaxError, ValueError (null characters), MemoryError or RecursionError (nested too deeply) for an invalid
    program."""
    tree = ast.parse(source, NAME)
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        show = ast.parse("__import__('sys').displayhook()", mode="eval").body
        assert isinstance(show, ast.Call)
        for node in ast.walk(show):
            ast.copy_location(node, last.value)
        show.args = [last.value]
        last.value = show
    return tree


def show(value: object) -> None:
    """Print a value, except None: most last expressions that are None are calls made for their effect."""
    if value is not None:
        print(value)


def short_traceback(error: BaseException) -> str:
    """Return an exception's traceback as text, without our own frames and folders, innermost frames only."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code.co_filename != NAME:
        entry = entry.tb_next
    error.__traceback__ = entry  # None for a syntax error, which names its lines itself
    told = traceback.TracebackException.from_exception(error, limit=-FRAMES)
    seen, waiting, ours = set(), [told], show.__code__.co_filename
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        frames = [f for f in part.stack if f.filename != ours and not f.filename.startswith("<frozen")]
        part.stack = traceback.StackSummary.from_list(
            [traceback.FrameSummary(_short(f.filename), f.lineno, f.name, line=f.line) for f in frames]
        )
        waiting += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
    return "".join(told.format())


def _short(filename: str) -> str:
    return filename if filename == NAME else filename.rpartition(LIBRARY)[2].rpartition("site-packages" + os.sep)[2]


def execute(source: str) -> int:
    """Run a program as ``__main__`` and return Python's exit code. Prints to stdout, errors to stderr."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.displayhook = show
    site.setquit()  # exit and quit: the interpreter runs without site
    getattr(sys, "set_int_max_str_digits", int)(0)  # the deadline is the limit
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    try:
        exec(compile(with_echo(source), NAME, "exec", dont_inherit=True), module.__dict__)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        code = 1
        _tell(error)
    return max(code, _finish())


def _tell(error: BaseException) -> None:
    try:
        text = short_traceback(error)
    except BaseException:  # no memory left, or an exception that cannot be formatted
        text = type(error).__name__ + "\n"
    try:
        sys.stdout.flush()
    except BaseException:
        pass  # the program closed or replaced it
    os.write(2, text.encode("utf-8", "backslashreplace"))


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    os.write(2, f"{error.code}\n".encode("utf-8", "backslashreplace"))
    return 1


def _finish() -> int:
    """Do the interpreter's last steps: wait for threads, call registered functions, flush. Returns 1 if one raises,
    else 0."""
    wait = threading._shutdown  # pyright: ignore[reportAttributeAccessIssue]  # as CPython does at its own end
    for step in (wait, atexit._run_exitfuncs, lambda: sys.stdout.flush()):
        try:
            step()
        except SystemExit:
            pass
        except (OSError, ValueError, AttributeError):  # stdout was closed or replaced
            pass
        except BaseException as error:
            _tell(error)
            return 1
    return 0


def fresh_streams() -> None:
    """Open new text streams for ``sys.stdin``, ``stdout`` and ``stderr`` over descriptors 0, 1 and 2. Invalid
    characters are written with backslashes."""
    given = io.BufferedReader(io.FileIO(0, "rb", closefd=False))
    sys.stdin = io.TextIOWrapper(given, encoding="utf-8", errors="surrogateescape")
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(io.FileIO(fd, "wb", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.__stdin__ = sys.stdin
