"""The quantities that the tables print, from the paper and from our records; None is "not known"."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from analysis import run_artifacts
from analysis.paper_data import printed, value
from analysis.torchgpipe.sweep_results import ROWS, Results, Source

GIB = 2**30
FILES = {
    1: "torchgpipe_table1_ablation",
    2: "torchgpipe_table2_amoebanet_speed",
    3: "torchgpipe_table3_unet_memory",
    4: "torchgpipe_table4_unet_speed",
}
NAMES = {
    1: {"speed-up": "speedup_vs_baseline", "utilization": "gpu_utilization", "memory": "memory_usage_total"},
    2: {"speed-up": "relative_speedup"},
    3: {"memory": "memory_usage_total", "parameters": "parameters_exact"},
    4: {"speed-up": "speedup_vs_naive"},
}
"""Names of quantities in the files of the published numbers, where they differ."""


@dataclass(frozen=True)
class Quantity:
    """A line of each row of a table; `of` gives our figure, `text` formats it and the paper's."""

    name: str
    of: Callable[[Results, int, str, Source], float | None]
    text: Callable[[float], str]


def throughput(results: Results, table: int, row: str, source: Source) -> float | None:
    """Samples a second."""
    value: float | None = results.metric(table, row, source, "throughput")
    return value


def speed_up(results: Results, table: int, row: str, source: Source) -> float | None:
    """Throughput / that of the table's first row."""
    own, first = (throughput(results, table, one, source) for one in (row, ROWS[table][0]))
    return own / first if own and first else None


def small_throughput(results: Results, row: str) -> float | None:
    """Samples a second in a row of Table 2 in small."""
    record = results.small(row)
    return record.metrics.get("throughput") if record and record.status == "ok" else None


def small_speed_up(results: Results, row: str) -> float | None:
    """Throughput / that of n=2 m=1, as in the paper."""
    own, first = (small_throughput(results, one) for one in (row, ROWS[2][0]))
    return own / first if own and first else None


def utilization(results: Results, table: int, row: str, source: Source) -> float | None:
    """Mean over devices of busy compute time / step time, in percent."""
    shares = results.metric(table, row, source, "utilization")
    return 100 * statistics.mean(shares) if shares else None


def memory(results: Results, table: int, row: str, source: Source) -> float | None:
    """Sum over devices of what a caching allocator reserves at least (`harness.simulator.Peak`), in GiB; simulated."""
    peaks = results.metric(table, row, source, "peaks") if source == "simulated" else None
    reserved = [peak.get("reserved") for peak in peaks or ()]
    return sum(reserved) / GIB if reserved and all(reserved) else None


def live_memory(results: Results, table: int, row: str, source: Source) -> float | None:
    """Sum over devices of the peak of live bytes, in GiB."""
    peaks = results.metric(table, row, source, "peak_memory_bytes")
    return sum(peaks) / GIB if peaks else None


def parameters(results: Results, table: int, row: str, source: Source) -> float | None:
    """Parameters of the U-Net that the row's record has run, as its profile has them; None without that."""
    record = results.record(table, row, source)
    if record is None or record.status != "ok":
        return None
    return run_artifacts.optional(run_artifacts.parameters, record)


def unet_parameters(convs: int, channels: int) -> int:
    """Parameters of U-Net (B, C): 3 x 3 convolutions in eleven cells, and one of 1 x 1 at the end; none has a bias."""
    down = [(channels * 2**i // 2 if i else 3, channels * 2**i, channels * 2**i) for i in range(5)]
    up = [(channels * 2 ** (i + 1), channels * 2**i // 2, channels * 2**i // 2) for i in range(5)]
    products = 0
    for inside, middle, outside in [*down, (16 * channels, 32 * channels, 16 * channels), *up]:
        several = inside * middle + (convs - 2) * middle**2 + middle * outside
        products += several if convs > 1 else inside * outside
    return 9 * products + channels // 2


def paper(table: int, row: str, quantity: str) -> float | None:
    """The published figure."""
    name = NAMES[table].get(quantity, quantity)
    where = [int(number) for number in re.findall(r"\d+", row)] if table == 2 else []
    if where:
        return value(FILES[table], name, scheme="torchgpipe", devices=where[0], micro_batches=where[1])
    return value(FILES[table], name, scheme=row)


def gpipe(row: str) -> float:
    """GPipe's speed-up on TPUs in a row of Table 2, which the paper quotes."""
    devices, micro_batches = (int(number) for number in re.findall(r"\d+", row))
    return printed(FILES[2], "relative_speedup", scheme="GPipe [11]", devices=devices, micro_batches=micro_batches)


def p40_gib() -> float:
    """Memory of one of the paper's cards."""
    return printed("torchgpipe_setup_and_text", "gpu_memory")


SPEED = Quantity("throughput", throughput, lambda x: f"{x:.3f} /s")
SPEED_UP = Quantity("speed-up", speed_up, lambda x: f"{x:.3f}")
UTILIZATION = Quantity("utilization", utilization, lambda x: f"{x:.0f} %")


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"


MEMORY = Quantity("memory", memory, _size)
LIVE_MEMORY = Quantity("live memory", live_memory, _size)
PARAMETERS = Quantity("parameters", parameters, lambda x: f"{x:,.0f}")
QUANTITIES = {
    1: (SPEED, SPEED_UP, UTILIZATION, MEMORY, LIVE_MEMORY),
    2: (SPEED, SPEED_UP),
    3: (PARAMETERS, MEMORY, LIVE_MEMORY),
    4: (SPEED, SPEED_UP),
}
