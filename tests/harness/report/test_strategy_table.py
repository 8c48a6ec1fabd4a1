"""The strategies of a plan on the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from harness.core.plan import Mesh, Plan, Stage, Traffic
from harness.report.strategy_table import comparison_table, format_strategy, strategy_table


def rows(table: Table) -> list[list[str]]:
    """The cells: columns are at least two spaces apart."""
    console = Console(file=io.StringIO(), width=220)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [re.split(r" {2,}", row.strip()) for row in console.file.getvalue().splitlines() if row.strip()]


def figures(seconds: float, size: int, held: int = 2**20) -> dict:
    spent = {"forward": seconds, "backward": seconds, "weights": 0.0}
    return {"seconds": spent, "bytes": {"all_gather": size}, "held_bytes": held}


QKV, UP = "block_{}.attention.qkv", "block_{}.mlp.up"
NAMES = [name.format(k) for k in range(3) for name in (QKV, UP)]
STRATEGY = {"embedding": (4, 1, 2), **{name: (4, 2, 1) if "qkv" in name else (1, 2, 4) for name in NAMES}}
PLAN = Plan(
    Mesh(tensor=8), (Stage(0, 4, 0),), 2,
    strategy=STRATEGY,
    layouts={"embedding": ((), (4,)), **dict.fromkeys(NAMES, ((4,), (8,)))},
    traffic=((Traffic("all_gather", "forward", 1e-3, 2**20), Traffic("all_reduce", "weights", 3e-3, 2**10)),),
    predicted={
        "communication_s": 5e-3, "held_bytes": 2**30,
        "communication_by_phase_s": {"forward": 2e-3, "backward": 0.0, "weights": 3e-3},
        "products": {"embedding": figures(0.0, 0), **dict.fromkeys(NAMES, figures(1e-3, 2**20))},
        "baselines": {
            "megatron": {"communication_s": 7e-3, "communication_by_phase_s": {"weights": 7e-3},
                         "bytes": {"all_reduce": 2**20}, "held_bytes": 2**31},
            "data_parallel": {"why": "does not fit: needs at least 2.0 GiB, there are 1.0 GiB"},
        },
    },
)  # fmt: skip


def test_products_that_are_split_the_same_way_are_one_row_with_their_sums() -> None:
    assert rows(strategy_table(PLAN)) == [
        ["matmul", "(p0, p1, p2)", "rows in", "rows out", "forward", "backward", "weights", "all_gather", "holds"],
        ["embedding", "(4, 1, 2)", "ready", "4", "0", "0", "0", "0", "1.0 MiB"],
        ["block_0..2.attention.qkv", "(4, 2, 1)", "4", "8", "3.0 ms", "3.0 ms", "0", "3.0 MiB", "3.0 MiB"],
        ["block_0..2.mlp.up", "(1, 2, 4)", "4", "8", "3.0 ms", "3.0 ms", "0", "3.0 MiB", "3.0 MiB"],
    ]


def test_a_product_that_differs_from_the_others_parts_the_run() -> None:
    other = replace(PLAN, strategy=STRATEGY | {UP.format(1): (2, 2, 2)})
    names = [row[0] for row in rows(strategy_table(other))[1:]]
    assert names == ["embedding", "block_0..2.attention.qkv", "block_0.mlp.up", "block_1.mlp.up", "block_2.mlp.up"]
    products = PLAN.predicted["products"] | {QKV.format(2): figures(9e-3, 2**20)}
    slower = replace(PLAN, predicted=PLAN.predicted | {"products": products})
    names = [row[0] for row in rows(strategy_table(slower))[1:]]
    assert names == ["embedding", "block_0..1.attention.qkv", "block_0..2.mlp.up", "block_2.attention.qkv"]


def test_a_plan_without_layouts_does_not_know_where_tensors_lie() -> None:
    (_, first, *_) = rows(strategy_table(replace(PLAN, layouts={})))
    assert first[2:4] == ["-", "-"]


def test_several_nodes_of_several_devices_have_pairs() -> None:
    assert format_strategy((2, 1, 1, 4, 1, 2)) == "(2 x 1, 1 x 4, 1 x 2)"
    pairs = replace(PLAN, strategy=dict.fromkeys(STRATEGY, (2, 1, 1, 4, 1, 2)))
    title, first, *_ = rows(strategy_table(pairs))
    assert title[1] == "(p0, p1, p2), each nodes x devices"
    assert first[1] == "(2 x 1, 1 x 4, 1 x 2)"


def test_the_baselines_stand_below_the_plan_with_the_reason_where_they_cannot() -> None:
    assert rows(comparison_table(PLAN, "autoddl")) == [
        ["of a step", "communication", "forward", "backward", "weights", "all_gather", "all_reduce", "holds"],
        ["autoddl", "5.0 ms", "2.0 ms", "0", "3.0 ms", "2.0 MiB", "1.0 KiB", "1.0 GiB"],
        ["megatron", "7.0 ms", "0", "0", "7.0 ms", "0", "1.0 MiB", "2.0 GiB"],
        ["data_parallel", *["-"] * 7, "does not fit: needs at least 2.0 GiB, there are 1.0 GiB"],
    ]


def test_a_baseline_is_not_compared_with_itself() -> None:
    assert [row[0] for row in rows(comparison_table(PLAN, "megatron"))[1:]] == ["megatron", "data_parallel"]
