"""Tables of a plan's strategies: each matmul, and what the baselines would communicate instead.

matmul                   (p0, p1, p2)  rows in  rows out  forward  backward  weights  all_gather ...   holds
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

from harness.core.plan import Plan
from harness.core.units import UNKNOWN, seconds, size

PHASES = ("forward", "backward", "weights")
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "reduce")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class _Row:
    """Matmuls with the same split: the first one's name, and how many with consecutive numbers follow it."""

    name: str
    more: int
    strategy: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    figures: dict[str, Any]

    @property
    def title(self) -> str:
        """The name of the row: block_0..31.attention.qkv."""
        first = NUMBER.search(self.name)
        if not self.more or not first:
            return self.name
        return f"{self.name[: first.end()]}..{int(first[0]) + self.more}{self.name[first.end() :]}"


def strategy_table(plan: Plan) -> Table:
    """Returns a row for each matmul, or for a run of matmuls with the same split.

    It has the strategy, the parts into which samples are split in the layouts of input and output, and for one device
    and step the seconds of communication by phase, bytes sent and bytes held. A row of several has their sums.
    """
    rows = [*_merged_rows(plan)]
    kinds = [kind for kind in KINDS if any(kind in row.figures["bytes"] for row in rows)]
    pairs = any(len(row.strategy) > 3 for row in rows)
    three = any(len(row.strategy) in (3, 6) for row in rows)
    mesh = any(len(row.strategy) in (2, 4) for row in rows)
    title = " or ".join(["(p0, p1, p2)"] * three + ["(rows, columns)"] * mesh) + ", each nodes x devices" * pairs
    table = _table(["matmul", title, "rows in", "rows out", *PHASES, *kinds, "holds"])
    for row in rows:
        layouts = [_parts(layout) for layout in row.layouts[:2]] or [UNKNOWN, UNKNOWN]
        table.add_row(*map(Text, [row.title, format_strategy(row.strategy), *layouts, *_figures(row.figures, kinds)]))
    return table


def comparison_table(plan: Plan, name: str) -> Table:
    """Returns what one device communicates in a step under this plan, by planner `name`, and under the baselines."""
    this_plan = _as_figures({**plan.predicted, "bytes": _sum(_bytes(plan))})
    others = {name: _as_figures(figures) for name, figures in plan.predicted["baselines"].items()}
    schemes = {name: this_plan} | {other: figures for other, figures in others.items() if other != name}
    kinds = [kind for kind in KINDS if any(kind in figures["bytes"] for figures in schemes.values())]
    table = _table(["of a step", "communication", *PHASES, *kinds, "holds", ""])
    for scheme, figures in schemes.items():
        cells = (
            [UNKNOWN] * (5 + len(kinds))
            if figures["why"]
            else [seconds(figures["communication_s"]), *_figures(figures, kinds)]
        )
        table.add_row(*map(Text, [scheme, *cells, figures["why"]]))
    return table


def format_strategy(strategy: Sequence[int]) -> str:
    """Formats a strategy, or a mesh: (4, 8, 2), or (1 x 4, 2 x 1, 1 x 4) where nodes have several devices."""
    if len(strategy) in (2, 3):
        return f"({', '.join(map(str, strategy))})"
    return f"({', '.join(_parts(strategy[i : i + 2]) for i in range(0, len(strategy), 2))})"


def _parts(numbers: Sequence[int]) -> str:
    """Formats the parts of a layout; "ready" for an input that needs no communication."""
    return " x ".join(map(str, numbers)) or "ready"


def _figures(figures: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    spent = [figures["seconds"].get(phase, 0.0) for phase in PHASES]
    sent = [figures["bytes"].get(kind, 0) for kind in kinds]
    return [
        *(seconds(value) if value else "0" for value in spent),
        *(size(value) if value else "0" for value in sent),
        size(figures["held_bytes"]),
    ]


def _merged_rows(plan: Plan) -> Iterator[_Row]:
    """Yields rows; matmuls whose names differ only in one number, which increases by one, share a row."""
    families: dict[object, list[str]] = {}
    for name in plan.strategy:
        families.setdefault(_family(plan, name), []).append(name)
    runs = [list(run) for names in families.values() for run in _runs(names)]
    order = {name: number for number, name in enumerate(plan.strategy)}
    for run in sorted(runs, key=lambda run: order[run[0]]):
        figures = [plan.predicted["products"][name] for name in run]
        whole = {
            "seconds": _sum(part["seconds"] for part in figures),
            "bytes": _sum(part["bytes"] for part in figures),
            "held_bytes": sum(part["held_bytes"] for part in figures),
        }
        yield _Row(run[0], len(run) - 1, plan.strategy[run[0]], plan.layouts.get(run[0], ()), whole)


def _family(plan: Plan, name: str) -> object:
    """Returns a key that is equal for matmuls that share a row if their numbers are consecutive."""
    matmul = plan.predicted["products"][name]
    figures = [
        f"{value:.6g}" for value in (*matmul["seconds"].values(), *matmul["bytes"].values(), matmul["held_bytes"])
    ]
    return NUMBER.sub("#", name, count=1), plan.strategy[name], plan.layouts.get(name), *figures


def _runs(names: Sequence[str]) -> Iterator[list[str]]:
    numbers = [int(match[0]) if (match := NUMBER.search(name)) else 0 for name in names]
    for _, run in groupby(zip(names, numbers, range(len(names)), strict=True), key=lambda one: one[1] - one[2]):
        yield [name for name, _, _ in run]


def _bytes(plan: Plan) -> Iterator[dict[str, float]]:
    """Yields the bytes that a device sends in a step, by algorithm."""
    for traffic in (traffic for stage in plan.traffic for traffic in stage):
        yield {traffic.algorithm: traffic.bytes * (1 if traffic.phase == "weights" else plan.micro_batches)}


def _as_figures(predicted: dict[str, Any]) -> dict[str, Any]:
    return (
        {"why": "", "bytes": {}, "held_bytes": 0}
        | predicted
        | {"seconds": predicted.get("communication_by_phase_s", {})}
    )


def _sum(parts: Iterable[dict[str, float]]) -> dict[str, Any]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def _table(titles: Sequence[str]) -> Table:
    """Makes a table with texts to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        left = title in ("matmul", "of a step", "")
        table.add_column(Text(title), justify="left" if left else "right", overflow="fold")
    return table
