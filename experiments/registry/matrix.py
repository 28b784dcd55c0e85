"""Expands a table, such as a paper's, into experiments: one for every cell of ``matrix:``. Imports without torch.

::

    inherits: [...]                     # this and other keys of an experiment file hold for all cells
    matrix:
      name: <method>_<model>_<world>    # name of a cell's experiment
      axes:                             # their values are partial experiment files, merged in this order
        method:
          grpo:
            inherits: [sdar/bases/grpo]
            experiment: {summary: "success alone, <model.title> in <world.title>"}
          sdar_beta_10: {only: {model: qwen2.5_7b}, inherits: [sdar/bases/gated], model: {init_args: {beta: 10.0}}}
        model:
          qwen2.5_7b: {vars: {title: Qwen2.5-7B}, paths: {base: "${paths.models}/Qwen2.5-7B-Instruct"}}
        world: ...
      cells:                            # further keys for some cells
        - where: {method: sdar, world: alfworld}
          experiment: {compare: [grpo_<model>_<world>]}
      published:                        # the paper's numbers; they become the cells' `experiment.reproduces`
        - where: {world: alfworld}
          format: "<method.row> row, average {}"
          columns: {model: [qwen3_1.7b, qwen2.5_3b, qwen2.5_7b]}
          rows:                         # by values of the remaining axis; null: no number
            sdar: [53.9, 84.4, 85.9]

``<axis>`` is replaced by a value's name, ``<axis.var>`` by one of its ``vars`` (alone in a string it keeps its type).
``only`` limits a value to some cells; ``only`` and ``where`` take a value or a list of them. ``format`` is a Python
format string, or one for each count of numbers (``{1: ..., 2: ...}``); a cell with several numbers is a list.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.registry.errors import ExperimentError, nearest, require_keys
from experiments.registry.files import Config, merge

KEYS = ("name", "axes", "cells", "published")
SECTIONS = ("inherits", "experiment", "seed_everything", "trainer", "model", "data", "task", "paths", "values")
PUBLISHED_KEYS = ("where", "format", "columns", "rows")
PLACEHOLDER = re.compile(r"<([^<>]*)>")
NAME = re.compile(r"[\w.\-]+")

Cell = dict[str, str]  # axis -> value


def expand(config: Config, path: str) -> dict[str, Config]:
    """Return the experiments that a table (``matrix:``) defines, by name, each in the form of an experiment file.

    Args:
        config: the file's content, with ``matrix``.
        path: the file's path, for messages.

    Raises:
        ExperimentError: an unknown key, axis, value or var, an invalid or duplicate name, or a row of published numbers
            of the wrong length.
    """
    matrix = config["matrix"]
    require_keys(matrix, KEYS, f"{path}: matrix")
    axes: dict[str, Config] = {}
    for name, values in (matrix.get("axes") or {}).items():
        require_keys(values, None, f"{path}: matrix.axes.{name}")
        axes[name] = {str(value): block for value, block in values.items()}
    if not axes or not all(axes.values()) or not isinstance(matrix.get("name"), str):
        raise ExperimentError(f"{path}: matrix needs a name, as in <method>_<model>, and axes with values")
    for axis, values in axes.items():
        for value, block in values.items():
            require_keys(block, (*SECTIONS, "vars", "only"), f"{path}: {axis} {value}")
    shared = {key: value for key, value in config.items() if key != "matrix"}
    found: dict[str, Config] = {}
    cells = list(_cells(axes, path))
    texts = _published(matrix.get("published") or [], axes, cells, path)
    extras = [_extra(extra, i, axes, cells, path) for i, extra in enumerate(matrix.get("cells") or [])]
    for i, cell in enumerate(cells):
        parts = [shared, *(axes[axis][value] for axis, value in cell.items())]
        parts += [extra for extra, where in extras if _fits(cell, where)]
        name = _filled(matrix["name"], cell, axes, path)
        if not NAME.fullmatch(name):
            raise ExperimentError(f"{path}: '{name}' cannot be a name: expected letters, digits and ._- (matrix.name)")
        if name in found:
            raise ExperimentError(f"{path}: matrix.name '{matrix['name']}' gives two cells the name '{name}'")
        found[name] = _joined(parts, cell, axes, path)
        if i in texts:
            found[name] = merge(found[name], {"experiment": {"reproduces": _filled(texts[i], cell, axes, path)}})
    return found


def _joined(parts: list[Config], cell: Cell, axes: Mapping[str, Config], path: str) -> Config:
    """Return one cell's experiment: its parts' ``inherits`` concatenated, and their other keys merged in order."""
    out: Config = {}
    for part in parts:
        own = {key: value for key, value in part.items() if key in SECTIONS and key != "inherits"}
        out = merge(out, _filled(own, cell, axes, path))
        rest = set(part) - set(SECTIONS) - {"vars", "only", "where"}
        out |= {key: part[key] for key in rest}  # unknown keys of the file; compose refuses them
    parents = [parent for part in parts for parent in part.get("inherits") or []]
    return {"inherits": _filled(parents, cell, axes, path), **out}


def _cells(axes: Mapping[str, Config], path: str) -> Iterator[Cell]:
    """Yield every allowed combination of the axes' values. A value's ``only`` restricts its combinations."""
    for axis, values in axes.items():
        for value, block in values.items():
            _check_where(block.get("only") or {}, axes, f"{path}: {axis} {value}, only")
    for values in itertools.product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        if all(_fits(cell, axes[axis][value].get("only") or {}) for axis, value in cell.items()):
            yield cell


def _fits(cell: Cell, where: Mapping[str, Any]) -> bool:
    return all(cell[axis] in _values(wanted) for axis, wanted in where.items())


def _values(wanted: Any) -> list[str]:
    return [str(value) for value in (wanted if isinstance(wanted, list) else [wanted])]


def _extra(extra: Any, number: int, axes: Mapping[str, Config], cells: list[Cell], path: str) -> tuple[Config, Config]:
    """Check an entry of a table's ``cells:``, and return the entry and its ``where`` (the cells it changes)."""
    at = f"{path}: matrix.cells[{number}]"
    require_keys(extra, (*SECTIONS, "where"), at)
    where = extra.get("where") or {}
    _check_where(where, axes, f"{at}.where")
    if not any(_fits(cell, where) for cell in cells):
        raise ExperimentError(f"{at}: no cell fits where: {where}; correct it")
    return extra, where


def _published(tables: list[Config], axes: Mapping[str, Config], cells: list[Cell], path: str) -> dict[int, str]:
    """Return the paper's published numbers as text, by the cell's position in ``cells``."""
    texts: dict[int, str] = {}
    for number, table in enumerate(tables):
        at = f"{path}: matrix.published[{number}]"
        require_keys(table, PUBLISHED_KEYS, at)
        where, columns = table.get("where") or {}, table.get("columns") or {}
        _check_where(where, axes, f"{at}.where")
        _check_where(columns, axes, f"{at}.columns")
        left = [axis for axis in axes if axis not in where and axis not in columns]
        if len(left) != 1 or len(columns) > 1:
            raise ExperimentError(f"{at}: where and columns must leave one axis for the rows; they leave {left}")
        column_cells = [{axis: value} for axis, wanted in columns.items() for value in _values(wanted)] or [{}]
        for row, numbers in (table.get("rows") or {}).items():
            _check_where({left[0]: row}, axes, f"{at}.rows")
            entries = numbers if columns else [numbers]
            if not isinstance(entries, list) or len(entries) != len(column_cells):
                raise ExperimentError(f"{at}: row '{row}' has {entries!r}, expected {len(column_cells)} numbers")
            for column, entry in zip(column_cells, entries, strict=True):
                if entry is not None:
                    wanted = {**where, **column, left[0]: row}
                    found = [i for i, cell in enumerate(cells) if _fits(cell, wanted)]
                    if not found:
                        raise ExperimentError(
                            f"{at}: row '{row}' has a number for {wanted}, but no cell fits; use null"
                        )
                    texts |= dict.fromkeys(found, _formatted(table.get("format"), entry, at))
    return texts


def _formatted(template: Any, entry: Any, at: str) -> str:
    numbers = entry if isinstance(entry, list) else [entry]
    try:
        return str(template[len(numbers)] if isinstance(template, dict) else template).format(*numbers)
    except (IndexError, ValueError, KeyError) as error:
        raise ExperimentError(f"{at}: {entry!r} does not fit into format: {template!r} ({error})") from None


def _filled(value: Any, cell: Cell, axes: Mapping[str, Config], path: str, within: tuple[str, ...] = ()) -> Any:
    """Return ``value`` with every placeholder ``<axis>`` and ``<axis.var>`` in its strings replaced, also inside vars.

    Args:
        within: placeholders that are being replaced, to find circles.
    """
    if isinstance(value, dict):
        return {key: _filled(item, cell, axes, path, within) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, cell, axes, path, within) for item in value]
    if not isinstance(value, str) or "<" not in value:
        return value

    def replacement(match: re.Match[str]) -> Any:
        axis, _, var = match.group(1).partition(".")
        if axis not in cell:
            raise ExperimentError(f"{path}: unknown '{match.group()}' in '{value}'{nearest(axis, cell)}")
        if not var:
            return cell[axis]
        found = axes[axis][cell[axis]].get("vars") or {}
        if var not in found:
            at = f"{path}: {axis} {cell[axis]}"
            raise ExperimentError(f"{at} has no '{var}' among its vars ('{value}'){nearest(var, found)}")
        if match.group() in within:
            raise ExperimentError(f"{path}: {match.group()} is defined by itself; give it a value")
        return _filled(found[var], cell, axes, path, (*within, match.group()))

    whole = PLACEHOLDER.fullmatch(value)
    return replacement(whole) if whole else PLACEHOLDER.sub(lambda match: str(replacement(match)), value)


def _check_where(where: Any, axes: Mapping[str, Config], at: str) -> None:
    require_keys(where, axes, at)
    for axis, wanted in where.items():
        for value in _values(wanted):
            if value not in axes[axis]:
                raise ExperimentError(f"{at}: unknown {axis} '{value}'{nearest(value, axes[axis])}")
