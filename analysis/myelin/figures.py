"""The quantities of the paper: those that it prints, and ours, which are made in the same way."""

from __future__ import annotations

import functools

from analysis.myelin.rows import Row
from analysis.published import Number, numbers, value

WORDS = 3e11
"""Of the training whose time is estimated (Sec. VI-D)."""
DAY_S = 86400
PEAK_FLOPS = 125e12
"""Of a V100 in half precision, as the paper has it."""
IPDPS = "myelin_ipdps_figures"
BYTES_PLAIN, BYTES_RESIDENT, BYTES_BUCKET = 20, 4, 16
"""Of the model state for each parameter, plain and with offloading, and of a bucket for each of its parameters."""
STATE = ("weights", "gradients", "optimizer")
WEIGHT_BYTES = 2


def days(row: Row) -> float:
    """Estimated training time: 300e9 words, as many a step as its tokens (Sec. VI-D)."""
    config = row.config
    return WORDS * row.step_s / (config["batch"]["size"] * config["model"]["sequence"]) / DAY_S


def flops(row: Row) -> float:
    """Hardware FLOPs of a step, recomputation included: the paper's 96 b s l h^2 (1 + s / 6h + V / 16 l h)."""
    model, b = row.config["model"], row.config["batch"]["size"]
    s, layers, h, v = (model[key] for key in ("sequence", "layers", "hidden", "vocabulary"))
    return float(96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)))


def percent_of_peak(row: Row) -> float:
    """Of all the devices' peaks, by hardware FLOPs."""
    return 100 * flops(row) / row.step_s / (PEAK_FLOPS * row.mesh.size)


def tail_s(row: Row) -> float:
    """What comes behind the pipelining phase: sums over replicas and updates, overlapped or not."""
    return row.step_s - row.phase_s("pipelining")


def state_bytes(row: Row) -> list[tuple[int, int, int]]:
    """Of each stage: parameters, bytes of the model state for each of them all the time, bytes of buckets.

    From the accounting of the run's engine. Stages that tie a weight have a copy each.
    """
    found = []
    for peak in row.metrics["peaks"]:
        held = peak["contents"]
        state = sum(held.get(part, 0) for part in STATE)
        found.append((held["weights"] // WEIGHT_BYTES, state, held.get("buckets", 0)))
    return found


def state_of_a_parameter(row: Row) -> float:
    """Bytes of the model state over all stages, buckets included, for each parameter of theirs."""
    each = state_bytes(row)
    return sum(held + buckets for _, held, buckets in each) / sum(phi for phi, _, _ in each)


def state_is_exact(row: Row) -> bool:
    """Whether the state is 20 bytes a parameter on each stage, or with offloading 4 and 16 for each of a bucket's."""
    if row["engine.offload"] != "true":
        return all((held, buckets) == (BYTES_PLAIN * phi, 0) for phi, held, buckets in state_bytes(row))
    bsize = row.config["engine"]["bsize"]
    return all(
        (held, buckets) == (BYTES_RESIDENT * phi, BYTES_BUCKET * min(bsize, phi))
        for phi, held, buckets in state_bytes(row)
    )


def published(file: str, metric: str, scheme: str, **where: int | str) -> float | None:
    """A number that is printed, or read off a printed figure."""
    return value(_numbers(file), metric, scheme, **where)


@functools.cache
def _numbers(file: str) -> list[Number]:
    return numbers(file)
