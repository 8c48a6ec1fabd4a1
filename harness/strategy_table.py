"""The strategies of a plan as tables: each matrix product, and what others would communicate instead.

product                  (p0, p1, p2)  rows in  rows out  forward  backward  weights  all_gather ...   holds
block_0..31.attention.qkv   (4, 8, 2)        4         8   1.2 ms    1.2 ms   3.1 ms     1.0 GiB   1.1 GiB
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.display import UNKNOWN, seconds, size
from harness.plan import Plan

PHASES = ("forward", "backward", "weights")
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class _Row:
    """Products that are split alike: the first one's name, the first number in it and how many follow it."""

    name: str
    more: int
    strategy: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    figures: dict[str, Any]

    @property
    def title(self) -> str:
        """block_0..31.attention.qkv"""
        first = NUMBER.search(self.name)
        if not self.more or not first:
            return self.name
        return f"{self.name[: first.end()]}..{int(first[0]) + self.more}{self.name[first.end() :]}"


def strategy_table(plan: Plan) -> Table:
    """A row for each product, or for a run of products that are alike: strategy, parts that the samples are in where
    its input comes from and where its output goes, and of one device and one step seconds of communication by phase,
    bytes sent, bytes held. A row of several has their sums.
    """
    rows = [*_folded(plan)]
    kinds = [kind for kind in KINDS if any(kind in row.figures["bytes"] for row in rows)]
    pairs = any(len(row.strategy) > 3 for row in rows)
    title = "(p0, p1, p2), each nodes x devices" if pairs else "(p0, p1, p2)"
    table = _table(["product", title, "rows in", "rows out", *PHASES, *kinds, "holds"])
    for row in rows:
        there = [_parts(one) for one in row.layouts[:2]] or [UNKNOWN, UNKNOWN]
        table.add_row(*map(Text, [row.title, told(row.strategy), *there, *_figures(row.figures, kinds)]))
    return table


def comparison_table(plan: Plan, name: str) -> Table:
    """What one device communicates in a step under this plan, by planner `name`, and under the paper's baselines."""
    own = _as_figures({**plan.predicted, "bytes": _sum(_bytes(plan))})
    others = {name: _as_figures(one) for name, one in plan.predicted["baselines"].items()}
    schemes = {name: own} | {other: figures for other, figures in others.items() if other != name}
    kinds = [kind for kind in KINDS if any(kind in one["bytes"] for one in schemes.values())]
    table = _table(["of a step", "communication", *PHASES, *kinds, "holds", ""])
    for scheme, one in schemes.items():
        cells = [UNKNOWN] * (5 + len(kinds)) if one["why"] else [seconds(one["communication_s"]), *_figures(one, kinds)]
        table.add_row(*map(Text, [scheme, *cells, one["why"]]))
    return table


def told(strategy: Sequence[int]) -> str:
    """(4, 8, 2), or (1 x 4, 2 x 1, 1 x 4) where nodes have several devices."""
    if len(strategy) == 3:
        return f"({', '.join(map(str, strategy))})"
    return f"({', '.join(_parts(strategy[i : i + 2]) for i in (0, 2, 4))})"


def _parts(numbers: Sequence[int]) -> str:
    """Of an input that lies ready there are none."""
    return " x ".join(map(str, numbers)) or "ready"


def _figures(one: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    spent = [one["seconds"].get(phase, 0.0) for phase in PHASES]
    sent = [one["bytes"].get(kind, 0) for kind in kinds]
    return [*(seconds(value) if value else "0" for value in spent), *(size(value) if value else "0" for value in sent),
            size(one["held_bytes"])]  # fmt: skip


def _folded(plan: Plan) -> Iterator[_Row]:
    """Products that differ in one number of their names only, which goes up by one, are a row."""
    families: dict[object, list[str]] = {}
    for name in plan.strategy:
        families.setdefault(_family(plan, name), []).append(name)
    runs = [list(run) for names in families.values() for run in _runs(names)]
    order = {name: number for number, name in enumerate(plan.strategy)}
    for run in sorted(runs, key=lambda run: order[run[0]]):
        figures = [plan.predicted["products"][name] for name in run]
        whole = {"seconds": _sum(one["seconds"] for one in figures), "bytes": _sum(one["bytes"] for one in figures),
                 "held_bytes": sum(one["held_bytes"] for one in figures)}  # fmt: skip
        yield _Row(run[0], len(run) - 1, plan.strategy[run[0]], plan.layouts.get(run[0], ()), whole)


def _family(plan: Plan, name: str) -> object:
    """Equal for products that are a row if their numbers follow each other."""
    own = plan.predicted["products"][name]
    figures = [f"{value:.6g}" for value in (*own["seconds"].values(), *own["bytes"].values(), own["held_bytes"])]
    return NUMBER.sub("#", name, count=1), plan.strategy[name], plan.layouts.get(name), *figures


def _runs(names: Sequence[str]) -> Iterator[list[str]]:
    numbers = [int(found[0]) if (found := NUMBER.search(name)) else 0 for name in names]
    for _, run in groupby(zip(names, numbers, range(len(names)), strict=True), key=lambda one: one[1] - one[2]):
        yield [name for name, _, _ in run]


def _bytes(plan: Plan) -> Iterator[dict[str, float]]:
    """What a device sends in a step, all that its stage tells of."""
    for one in (one for stage in plan.traffic for one in stage):
        yield {one.algorithm: one.bytes * (1 if one.phase == "weights" else plan.micro_batches)}


def _as_figures(one: dict[str, Any]) -> dict[str, Any]:
    return {"why": "", "bytes": {}, "held_bytes": 0} | one | {"seconds": one.get("communication_by_phase_s", {})}


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, float] = {}
    for one in parts:
        for name, value in one.items():
            found[name] = found.get(name, 0) + value
    return found


def _table(titles: Sequence[str]) -> Table:
    """Texts to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        left = title in ("product", "of a step", "")
        table.add_column(Text(title), justify="left" if left else "right", overflow="fold")
    return table
