"""All published families of pipeline schedules, by the name that `engine.schedule` gives them.

Left out is Chimera (arXiv 2107.06925): its second pipeline runs the other way round and needs each stage on two
devices, which a plan has only as replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.core import divisors
from harness.core.problem import LEAVE_OUT, Fix, Problem
from harness.schedule import Schedule
from harness.schedule.builders.dualpipe import dualpipe_v, too_few
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.interleaved import interleaved, looped_bfs, no_full_rounds
from harness.schedule.builders.one_f_one_b import eager_1f1b, one_f_one_b
from harness.schedule.builders.v_schedules import v_half, v_min
from harness.schedule.builders.zero_bubble import interleaved_zb, zb_h1, zb_h2, zbv
from harness.schedule.transfers import Transfer

Places = Literal["one", "loop", "v"]
"""One stage on each device; `chunks` on each, in turn; two on each, down the devices and up again."""
Builder = Callable[[int, int, int, Sequence[Transfer]], Schedule]


@dataclass(frozen=True)
class Family:
    """`text` says what it is, `split` whether its backward passes come in halves."""

    name: str
    text: str
    places: Places
    builder: Builder
    split: bool = False
    refuses: Callable[[int, int], Problem | None] = lambda micro_batches, devices: None
    """What is wrong with these numbers of micro-batches and devices."""

    @property
    def stages_per_device(self) -> int | None:
        """Stages of each device; None where the user says how many (`chunks`)."""
        return {"one": 1, "loop": None, "v": 2}[self.places]

    def placement(self, devices: int, chunks: int) -> tuple[int, ...]:
        """Returns the device of each stage."""
        down = tuple(range(devices))
        return (*down, *reversed(down)) if self.places == "v" else down * (self.stages_per_device or chunks)

    def build(self, micro_batches: int, devices: int, chunks: int, transfers: Sequence[Transfer]) -> Schedule:
        """Returns the schedule. Raises ProblemError for numbers that it does not have."""
        return self.builder(micro_batches, devices, chunks, transfers)


_ALL = (
    Family("gpipe", "all forward, then all backward passes", "one", lambda m, n, c, t: fill_drain(m, range(n), t)),
    Family("1f1b", "one forward, one backward", "one", lambda m, n, c, t: one_f_one_b(m, range(n), t)),
    Family("eager_1f1b", "1F1B that hides its messages", "one", lambda m, n, c, t: eager_1f1b(m, range(n), t)),
    Family("interleaved1f1b", "1F1B of several stages on a device", "loop", interleaved, refuses=no_full_rounds),
    Family("looped_bfs", "GPipe of several stages on a device", "loop", looped_bfs),
    Family("zb_h1", "zero bubble, memory of 1F1B", "one", lambda m, n, c, t: zb_h1(m, n, t), split=True),
    Family("zb_h2", "zero bubble, twice the memory", "one", lambda m, n, c, t: zb_h2(m, n, t), split=True),
    Family("interleaved_zb", "zero bubble, interleaved", "loop", interleaved_zb, split=True, refuses=no_full_rounds),
    Family("zbv", "zero bubble in a V, memory of 1F1B", "v", lambda m, n, c, t: zbv(m, n, t), split=True),
    Family("v_half", "half of the memory of 1F1B", "v", lambda m, n, c, t: v_half(m, n, t), split=True),
    Family("v_min", "a third of the memory of 1F1B", "v", lambda m, n, c, t: v_min(m, n, t), split=True),
    Family("dualpipev", "pairs of passes in a V", "v", lambda m, n, c, t: dualpipe_v(m, n, t), True, too_few),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def micro_batch_fixes(micro_batches: int, shares: int, refuses: Callable[[int], Problem | None]) -> tuple[Fix, ...]:
    """Returns the nearest number of micro-batches that a schedule has and that divides the samples of a replica
    (`shares`), where there is one; and another schedule."""
    whole = divisors.list_divisors(max(1, shares))
    right = [count for count in whole if refuses(count) is None]
    nearest = sorted(right, key=lambda count: abs(count - micro_batches))[:1]
    other: Fix = {"engine.schedule": "gpipe"}
    if micro_batches not in whole:  # then the number is wrong for any schedule
        other["batch.micro_batches"] = divisors.nearest_divisors(whole[-1], micro_batches)[0]
    return (*({"batch.micro_batches": count} for count in nearest), other)


def chunks_of_file(chunks: int, default: int) -> list[Problem]:
    """Returns what is wrong with `engine.chunks` where a file says which stages a device has."""
    message = "has no effect, the rows of the file say which stages a device has"
    return [Problem("engine.chunks", chunks, message, ({"engine.chunks": LEAVE_OUT},))] * (chunks != default)


def wrong_chunks(schedule: str, chunks: int, default: int, least: int) -> list[Problem]:
    """Returns what is wrong with `engine.chunks`, the number of stages on each device: it is at least `least` with the
    schedules that let the user choose, and `default` or their own number with the others."""
    family = FAMILIES.get(schedule)
    if family is None:
        return []
    if family.stages_per_device is None:
        if chunks >= least:
            return []
        message = f"must be at least {least} with engine.schedule={schedule}"
        fixes: tuple[Fix, ...] = ({"engine.chunks": default}, {"engine.schedule": "1f1b", "engine.chunks": LEAVE_OUT})
        return [Problem("engine.chunks", chunks, message, fixes)]
    if chunks in (family.stages_per_device, default):
        return []
    message = f"is not the number of stages on a device, engine.schedule={schedule} has {family.stages_per_device}"
    fixes = ({"engine.chunks": LEAVE_OUT},)
    fixes += ({"engine.schedule": "interleaved1f1b"},) if chunks >= 2 else ()
    return [Problem("engine.chunks", chunks, message, fixes)]
