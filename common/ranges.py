"""Ranges of numbers, as annotations of constructors.

The command line's parser refuses numbers outside a range, and nan and infinity everywhere. Constructors do not repeat
these checks, so calls in Python are not checked.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, AllowInfNan, BeforeValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType  # in typing since Python 3.12


def _no_bool(value: Any) -> Any:
    """Refuse a boolean where a number is expected. pydantic would read ``true`` as 1, but in a configuration it is a
    mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


def _temperature(value: float) -> float:
    if 0 < value < 0.01:
        raise PydanticCustomError("temperature", "Input should be 0 (greedy) or at least 0.01, vLLM's lowest")
    return value


def _top_k(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("top_k", "Input should be -1 (all tokens) or at least 1")
    return value


# Named aliases: with postponed annotations jsonargparse sees only the plain type of a bare Annotated.
_NUMBER = BeforeValidator(_no_bool)
_FINITE = AllowInfNan(False)

NonNegativeInt = TypeAliasType("NonNegativeInt", Annotated[int, Ge(0), _NUMBER])
PositiveInt = TypeAliasType("PositiveInt", Annotated[int, Ge(1), _NUMBER])

FiniteFloat = TypeAliasType("FiniteFloat", Annotated[float, _FINITE, _NUMBER])
NonNegativeFloat = TypeAliasType("NonNegativeFloat", Annotated[float, Ge(0), _FINITE, _NUMBER])
PositiveFloat = TypeAliasType("PositiveFloat", Annotated[float, Gt(0), _FINITE, _NUMBER])
AtLeastOne = TypeAliasType("AtLeastOne", Annotated[float, Ge(1), _FINITE, _NUMBER])
AboveOne = TypeAliasType("AboveOne", Annotated[float, Gt(1), _FINITE, _NUMBER])
UnitInterval = TypeAliasType("UnitInterval", Annotated[float, Ge(0), Le(1), _NUMBER])  # [0, 1]
PositiveShare = TypeAliasType("PositiveShare", Annotated[float, Gt(0), Le(1), _NUMBER])  # (0, 1]
BelowOne = TypeAliasType("BelowOne", Annotated[float, Ge(0), Lt(1), _NUMBER])  # [0, 1)
OpenUnitInterval = TypeAliasType("OpenUnitInterval", Annotated[float, Gt(0), Lt(1), _NUMBER])  # (0, 1)

# Sampling options. vLLM takes temperatures up to 2; logits times a penalty in these bounds fit into float32.
Temperature = TypeAliasType(
    "Temperature", Annotated[float, Ge(0), Le(2), _FINITE, AfterValidator(_temperature), _NUMBER]
)
Penalty = TypeAliasType("Penalty", Annotated[float, Ge(1e-6), Le(1e6), _FINITE, _NUMBER])
TopK = TypeAliasType("TopK", Annotated[int, Ge(-1), Le(2**31 - 1), AfterValidator(_top_k), _NUMBER])  # -1: all tokens
MAX_TOP_LOGPROBS = 64  # vLLM's limit at its start
TopLogprobs = TypeAliasType("TopLogprobs", Annotated[int, Ge(1), Le(MAX_TOP_LOGPROBS), _NUMBER])
