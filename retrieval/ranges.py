"""Ranges of numbers, as annotations of the constructors that configurations name: the command line's parser refuses
what lies outside, and nan and infinity everywhere. Calls in Python are not checked.

Here because every other room may import it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, BeforeValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType  # in typing since Python 3.12


def _no_bool(value: Any) -> Any:
    """``true`` is 1 to pydantic; in a configuration it is a mistake."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


# Aliases with names: of a bare Annotated in a module with postponed annotations jsonargparse sees the plain type alone.
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

TopK = TypeAliasType("TopK", Literal[-1] | PositiveInt)  # -1: all tokens
