"""Draws a schedule: python -m harness.schedule NAME KEY=VALUE ...

    python -m harness.schedule gpipe stages=4 micro_batches=8 recompute=except_last
    python -m harness.schedule gpipe stages=4 micro_batches=4 recompute=always dependency=false
    python -m harness.schedule one_f_one_b stages=4 micro_batches=6
    python -m harness.schedule interleaved stages=4 chunks=2 micro_batches=4
    python -m harness.schedule message_driven stages=4 micro_batches=6 rule=backward_first limit=4
    python -m harness.schedule myelin stages=2 micro_batches=4 chunks=2 replicas=2
    python -m harness.schedule fill_drain stages=4 micro_batches=4
    python -m harness.schedule deepspeed stages=3 micro_batches=3
    python -m harness.schedule zbv stages=6 micro_batches=6
    python -m harness.schedule data_parallel micro_batches=2 kind=zero3
    python -m harness.schedule single micro_batches=4

gpipe          stages micro_batches recompute dependency     (dependency=false: torchgpipe without fork and join)
one_f_one_b    stages micro_batches recompute
interleaved    stages micro_batches recompute chunks         (stages / chunks devices)
message_driven stages micro_batches recompute rule limit     (RULES)
myelin         stages micro_batches order rule limit chunks replicas offload   (ORDERS)
fill_drain     stages micro_batches recompute                (GPipe as torch.distributed.pipelining runs it)
deepspeed      stages micro_batches recompute                (1F1B with messages that block)
zbv            stages micro_batches                          (stages / 2 devices; W: gradients of weights)
data_parallel  micro_batches recompute kind                  (KINDS; one stage, two replicas)
single         micro_batches recompute                       (one stage)

recompute is never (here for every schedule, if it is not given), except_last (what engine=gpipe does by default) or
always. 2F0, 2R0, 2B0: forward, recomputation, backward of micro-batch 0 on stage 2. Messages that stand between the
tasks of a device, collectives and buckets of the optimizer are not drawn: then lines below the picture have all.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from harness.op import COMPUTE
from harness.schedule import Schedule
from harness.schedule.deepspeed import deepspeed
from harness.schedule.fill_drain import fill_drain
from harness.schedule.gpipe import RECOMPUTE, gpipe
from harness.schedule.grid import grid
from harness.schedule.hops import Hop, hops
from harness.schedule.interleaved import interleaved
from harness.schedule.message_driven import message_driven
from harness.schedule.myelin import ORDERS, Chunk, Order, myelin
from harness.schedule.one_f_one_b import one_f_one_b
from harness.schedule.rule import RULES, RuleName
from harness.schedule.single import single
from harness.schedule.zero import SHARDINGS, Sharding, data_parallel
from harness.schedule.zero_bubble import zbv

COMMAND = "python -m harness.schedule"
RULED = [name for name in RULES if name != "in_order"]
USAGE = (__doc__ or "").replace("RULES", ", ".join(RULED)).replace("KINDS", ", ".join(SHARDINGS))
USAGE = USAGE.replace("ORDERS", ", ".join(ORDERS))
CHOICES = {"recompute": (RECOMPUTE, "never"), "rule": (RULED, "fifo"), "kind": (SHARDINGS, SHARDINGS[0]),
           "order": (ORDERS, ORDERS[0])}  # fmt: skip
"""Keys that are words: those that there are, and one that always works."""


def _hops(stages: int) -> list[Hop]:
    return hops([0] * (stages - 1), (), portals=True)


def _gpipe(stages: int = 4, micro_batches: int = 8, recompute: str = "never", dependency: bool = True) -> Schedule:
    return gpipe(micro_batches, range(stages), _hops(stages), recompute, dependency)


def _one_f_one_b(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return one_f_one_b(micro_batches, range(stages), _hops(stages), recompute)


def _interleaved(stages: int = 4, micro_batches: int = 8, recompute: str = "never", chunks: int = 2) -> Schedule:
    if stages % chunks:
        near = " or ".join(f"stages={k * chunks}" for k in (stages // chunks, stages // chunks + 1) if k)
        raise ValueError(f"stages {stages}   is no multiple of chunks {chunks}   -> {near}")
    devices = stages // chunks
    if chunks > 1 and micro_batches % devices:
        near = f"micro_batches={max(1, micro_batches // devices) * devices}"
        raise ValueError(f"micro_batches {micro_batches}   is no multiple of the {devices} devices   -> {near}")
    return interleaved(micro_batches, devices, chunks, _hops(stages), recompute)


def _message_driven(
    stages: int = 4, micro_batches: int = 8, recompute: str = "never", rule: str = "fifo", limit: int | None = None
) -> Schedule:
    return message_driven(micro_batches, range(stages), _hops(stages), cast(RuleName, rule), limit, recompute)


def _myelin(
    stages: int = 4, micro_batches: int = 8, order: str = ORDERS[0], rule: str = "fifo", limit: int | None = None,
    chunks: int = 1, replicas: int = 1, offload: bool = False,
) -> Schedule:  # fmt: skip
    own = (Chunk(0, ((0, 0),) if offload else ()),) * chunks
    return myelin(micro_batches, range(stages), _hops(stages), cast(Order, order), cast(RuleName, rule), limit,
                  replicas=replicas, chunks=[own] * stages)  # fmt: skip


def _fill_drain(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return fill_drain(micro_batches, range(stages), _hops(stages), recompute)


def _deepspeed(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return deepspeed(micro_batches, range(stages), _hops(stages), recompute)


def _zbv(stages: int = 8, micro_batches: int = 8) -> Schedule:
    if stages % 2:
        near = " or ".join(f"stages={k}" for k in (stages - 1, stages + 1) if k)
        raise ValueError(f"stages {stages}   is odd, each device has two   -> {near}")
    return zbv(micro_batches, stages // 2, _hops(stages))


def _data_parallel(micro_batches: int = 8, recompute: str = "never", kind: str = SHARDINGS[0]) -> Schedule:
    return data_parallel(micro_batches, 0, 2, cast(Sharding, kind), recompute)


def _single(micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return single(micro_batches, recompute)


DRAWN: dict[str, Callable[..., Schedule]] = {
    "gpipe": _gpipe,
    "one_f_one_b": _one_f_one_b,
    "interleaved": _interleaved,
    "message_driven": _message_driven,
    "myelin": _myelin,
    "fill_drain": _fill_drain,
    "deepspeed": _deepspeed,
    "zbv": _zbv,
    "data_parallel": _data_parallel,
    "single": _single,
}


def drawing(arguments: Sequence[str]) -> str:
    """The grid of the schedule that the command line names, and its lanes below where more than tasks blocks a device.

    Raises ValueError, in the user's keys.
    """
    name, *typed = arguments
    if name not in DRAWN:
        raise ValueError(f"{name}   is none of {', '.join(DRAWN)}   -> {COMMAND} gpipe")
    keys = inspect.signature(DRAWN[name]).parameters
    parted = [argument.partition("=") for argument in typed]
    known = {key: text for key, equals, text in parted if equals and key in keys}
    values = {key: _value(key, text) for key, text in known.items()}
    for argument, (key, equals, _) in zip(typed, parted, strict=True):
        if not equals or key not in keys:
            why = f"is no KEY=VALUE of {name}, whose keys are {', '.join(keys)}"
            mend = " ".join([COMMAND, name, *(f"{key}={text}" for key, text in known.items())])
            raise ValueError(f"{argument}   {why}   -> {mend}")
    schedule = DRAWN[name](**values)
    ops = [(lane.queue, op) for lane in schedule.lanes for op in lane.ops if op.kind not in COMPUTE]
    hidden = any(queue == "compute" or op.peer is None for queue, op in ops)
    picture = grid(replace(schedule, replicas=1))  # all are alike
    return f"{picture}\n\n{schedule.text()}" if hidden else picture


def _value(key: str, text: str) -> str | int:
    if key in CHOICES:
        known, default = CHOICES[key]
        if text not in known:
            raise ValueError(f"{key} {text}   is none of {', '.join(known)}   -> {key}={default}")
        return text
    if key in ("dependency", "offload"):
        if text not in ("true", "false"):
            raise ValueError(f"{key} {text}   is neither true nor false   -> {key}=true")
        return text == "true"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{key} {text}   is no whole number of at least 1   -> {key}=4")
    return int(text)


def main() -> int:
    """Exit code 2 where the command line names no schedule."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        print(drawing(arguments))
    except ValueError as error:
        print(f"{error}\n\nMore: {COMMAND} --help", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
