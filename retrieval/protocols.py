"""Checks whether a class fits a Protocol: its methods exist, and take every call that the Protocol declares.

jsonargparse compares signatures with their annotations, and refuses a class with other annotations (postponed,
narrower, missing). This module compares names, order, defaults and ``async``. Annotations are left to a type checker.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_refused: dict[str, tuple[str, str]] = {}  # name of a Protocol -> the class path refused last, and the reason


def compare_by_calls() -> None:
    """Patch jsonargparse so that it checks classes against Protocols with ``mismatch``, which ignores annotations.
    Idempotent.
    """
    from jsonargparse import _typehints

    of_jsonargparse = _typehints.implements_protocol
    if of_jsonargparse.__module__ == __name__:
        return

    def implements_protocol(value: Any, protocol: Any) -> bool:
        if not inspect.isclass(value) or not _typehints.is_protocol(protocol):  # an imported object or function
            return of_jsonargparse(value, protocol)
        declared: Any = _typehints.get_protocol_origin(protocol)  # without its type arguments
        members = _typehints.get_protocol_members(declared)
        reason = mismatch(value, declared, members)
        if reason is not None:
            _refused[declared.__name__] = (f"{value.__module__}.{value.__qualname__}", reason)
        return bool(members) and reason is None

    _typehints.implements_protocol = implements_protocol


def explain(message: str) -> str:
    """Return a parser's error message; if a class does not fit a Protocol, the message also says why.

    In a Union the message has no class path; then the last refusal is the reason.
    """

    def reason(found: re.Match[str]) -> str:
        named, protocol = found.groups()
        path, difference = _refused.get(protocol, (None, None))
        unknown = path is None or named not in (None, path)
        return found.group() if unknown else f"{path} does not fit {protocol}: {difference};"

    of_a_string = r"(?:Expected a path but \S+ either not accessible or invalid )?"  # the text could be a file name
    pattern = of_a_string + r"Import path(?: (\S+))? does not implement protocol (\w+)"
    return re.sub(pattern, reason, message).rstrip(";")


def mismatch(value: type, protocol: type, members: list[str]) -> str | None:
    """Return why the class ``value`` does not fit ``protocol``, as text, or None. The reason is its missing methods, or
    the first one that refuses a call.
    """
    if missing := [name for name in members if not callable(_method(value, name))]:
        return f"it has no method {' and no method '.join(missing)}"
    for name in members:
        declared = _parameters(protocol, name)
        try:
            given = _parameters(value, name)
        except (TypeError, ValueError):  # a method in C has no signature
            continue
        if (refusal := _refusal(given, declared)) is not None:
            wanted = f"{protocol.__name__}.{name}{_parameters_text(declared)}"
            return f"{name}{_parameters_text(given)} does not take the calls of {wanted}: {refusal}"
        if _is_async(protocol, name) and not (_is_async(value, name) or _may_be_awaited(given)):
            return f"{name} must be 'async def'"
        if _is_async(value, name) and not (_is_async(protocol, name) or _may_be_awaited(declared)):
            return f"{name} must not be 'async def'"
    return None


def _method(owner: type, name: str) -> Any:
    """Return a method of a class, or None. Ignores the metaclass's ``__call__``, which every class has."""
    return getattr(owner, name) if any(name in vars(base) for base in owner.__mro__) else None


def _parameters(owner: type, name: str) -> inspect.Signature:
    """Return the signature of a method as called on an instance, without ``self``."""
    signature = inspect.signature(_method(owner, name))
    if isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _refusal(given: inspect.Signature, declared: inspect.Signature) -> str | None:
    """Return Python's error text for a call that the signature ``declared`` allows and ``given`` refuses, or None.

    Tries each argument by position and by name, with and without the optional ones.
    """
    parameters = list(declared.parameters.values())
    for chosen in (parameters, [p for p in parameters if p.default is p.empty]):
        positional = [p.name for p in chosen if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: p.name for p in chosen if p.kind is p.KEYWORD_ONLY}
        positional_only = [p.name for p in chosen if p.kind is p.POSITIONAL_ONLY]
        both = {p.name: p.name for p in chosen if p.kind is p.POSITIONAL_OR_KEYWORD}
        try:
            bound = given.bind(*positional, **named)
            given.bind(*positional_only, **both, **named)
        except TypeError as error:
            return str(error)
        for name, argument in bound.arguments.items():
            if given.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and argument != name:
                return f"{name!r} is passed as {argument!r}"
    return None


def _parameters_text(signature: inspect.Signature) -> str:
    """Return a signature's parameters as text, without annotations.

    >>> _parameters_text(inspect.signature(lambda arguments, *, limit=3: None))
    '(arguments, *, limit=3)'
    """
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _is_async(owner: type, name: str) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(_method(owner, name)))


def _may_be_awaited(signature: inspect.Signature) -> bool:
    """Return whether a method without ``async def`` may return an awaitable: its annotation says so, or is missing."""
    if signature.return_annotation is signature.empty:
        return True
    return any(word in str(signature.return_annotation) for word in ("Any", "Awaitable", "Coroutine"))
