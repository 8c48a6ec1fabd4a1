"""Draws a schedule: python -m harness.schedule NAME KEY=VALUE ... [out=PATH], or FILE [out=PATH]

    python -m harness.schedule own.csv
    python -m harness.schedule gpipe stages=4 micro_batches=8 recompute=except_last
    python -m harness.schedule gpipe stages=4 micro_batches=4 recompute=always dependency=false
    python -m harness.schedule one_f_one_b stages=4 micro_batches=6
    python -m harness.schedule interleaved stages=4 chunks=2 micro_batches=4
    python -m harness.schedule message_driven stages=4 micro_batches=6 rule=backward_first limit=4
    python -m harness.schedule myelin stages=2 micro_batches=4 chunks=2 replicas=2
    python -m harness.schedule fill_drain stages=4 micro_batches=4
    python -m harness.schedule deepspeed stages=3 micro_batches=3
    python -m harness.schedule zbv stages=6 micro_batches=6
    python -m harness.schedule eager_1f1b stages=4 micro_batches=8
    python -m harness.schedule looped_bfs stages=4 micro_batches=4
    python -m harness.schedule zb_h1 stages=4 micro_batches=8
    python -m harness.schedule zb_h2 stages=4 micro_batches=8
    python -m harness.schedule interleaved_zb stages=4 micro_batches=4
    python -m harness.schedule v_half stages=6 micro_batches=6
    python -m harness.schedule v_min stages=6 micro_batches=6
    python -m harness.schedule dualpipev stages=4 micro_batches=6
    python -m harness.schedule data_parallel micro_batches=2 kind=zero3
    python -m harness.schedule single micro_batches=4

own.csv        out                                           (the actions of each device: docs/howto/own_schedule.md)
gpipe          stages micro_batches recompute dependency     (dependency=false: torchgpipe without fork and join)
one_f_one_b    stages micro_batches recompute
interleaved    stages micro_batches recompute chunks         (stages / chunks devices)
message_driven stages micro_batches recompute rule limit     (RULES)
myelin         stages micro_batches order rule limit chunks replicas offload   (ORDERS)
fill_drain     stages micro_batches recompute                (GPipe as torch.distributed.pipelining runs it)
deepspeed      stages micro_batches recompute                (1F1B with messages that block)
zbv            stages micro_batches                          (stages / 2 devices; W: gradients of weights)
eager_1f1b     stages micro_batches                          (1F1B that hides its messages)
looped_bfs     stages micro_batches chunks                   (GPipe of several stages on a device)
zb_h1          stages micro_batches                          (zero bubble, memory of 1F1B)
zb_h2          stages micro_batches                          (zero bubble, twice the memory)
interleaved_zb stages micro_batches chunks                   (zero bubble, interleaved)
v_half         stages micro_batches                          (stages / 2 devices; half of the memory of 1F1B)
v_min          stages micro_batches                          (stages / 2 devices; a third of it)
dualpipev      stages micro_batches                          (stages / 2 devices; pairs of passes)
data_parallel  micro_batches recompute kind                  (KINDS; one stage, two replicas)
single         micro_batches recompute                       (one stage)

out=PATH, once or more, writes the schedule: its actions as .csv or .json, a picture as .png, a trace for
ui.perfetto.dev as .trace.json.gz.

recompute is never (here for every schedule, if it is not given), except_last (what engine=gpipe does by default) or
always. 2F0, 2R0, 2B0: forward, recomputation, backward of micro-batch 0 on stage 2. Messages in the compute queue,
collectives and buckets of the optimizer are not drawn: if there are any, lines below the picture list all ops.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from harness.core.op import COMPUTE
from harness.core.problem import Fix, Problem, ProblemError
from harness.report import schedule_files
from harness.schedule import Schedule, action_file
from harness.schedule.builders.data_parallel import SHARDINGS, Sharding, data_parallel
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.builders.interleaved import interleaved
from harness.schedule.builders.message_driven import message_driven
from harness.schedule.builders.myelin import ORDERS, Chunk, Order, myelin
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.single import single
from harness.schedule.families import FAMILIES, Family
from harness.schedule.policy import RULES, RuleName
from harness.schedule.transfers import Transfer, transfers

IDLE = "."
COMMAND = "python -m harness.schedule"
RULED = [name for name in RULES if name != "in_order"]
USAGE = (__doc__ or "").replace("RULES", ", ".join(RULED)).replace("KINDS", ", ".join(SHARDINGS))
USAGE = USAGE.replace("ORDERS", ", ".join(ORDERS))
CHOICES = {
    "recompute": (RECOMPUTE, "never"),
    "rule": (RULED, "fifo"),
    "kind": (SHARDINGS, SHARDINGS[0]),
    "order": (ORDERS, ORDERS[0]),
}
"""Keys with named values: the values, and one that is always valid."""


def _transfers(stages: int) -> list[Transfer]:
    return transfers([0] * (stages - 1), (), portals=True)


def _gpipe(stages: int = 4, micro_batches: int = 8, recompute: str = "never", dependency: bool = True) -> Schedule:
    return gpipe(micro_batches, range(stages), _transfers(stages), recompute, dependency)


def _one_f_one_b(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return one_f_one_b(micro_batches, range(stages), _transfers(stages), recompute)


def _interleaved(stages: int = 4, micro_batches: int = 8, recompute: str = "never", chunks: int = 2) -> Schedule:
    if stages % chunks:
        near = tuple(
            {"stages": devices * chunks} | _full(micro_batches, devices)
            for devices in (stages // chunks, stages // chunks + 1)
            if devices
        )
        raise ProblemError(Problem("stages", stages, f"is not a multiple of chunks {chunks}", near))
    devices = stages // chunks
    if chunks > 1 and (fix := _full(micro_batches, devices)):
        message = f"is not a multiple of the {devices} devices"
        raise ProblemError(Problem("micro_batches", micro_batches, message, (fix,)))
    return interleaved(micro_batches, devices, chunks, _transfers(stages), recompute)


def _full(micro_batches: int, devices: int) -> Fix:
    """Fewer micro-batches, or at least one for each device, where they do not divide among the devices."""
    return {"micro_batches": max(1, micro_batches // devices) * devices} if micro_batches % devices else {}


def _message_driven(
    stages: int = 4, micro_batches: int = 8, recompute: str = "never", rule: str = "fifo", limit: int | None = None
) -> Schedule:
    return message_driven(micro_batches, range(stages), _transfers(stages), cast(RuleName, rule), limit, recompute)


def _myelin(
    stages: int = 4,
    micro_batches: int = 8,
    order: str = ORDERS[0],
    rule: str = "fifo",
    limit: int | None = None,
    chunks: int = 1,
    replicas: int = 1,
    offload: bool = False,
) -> Schedule:
    of_stage = (Chunk(0, ((0, 0),) if offload else ()),) * chunks
    return myelin(
        micro_batches,
        range(stages),
        _transfers(stages),
        cast(Order, order),
        cast(RuleName, rule),
        limit,
        replicas=replicas,
        chunks=[of_stage] * stages,
    )


def _fill_drain(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return fill_drain(micro_batches, range(stages), _transfers(stages), recompute)


def _deepspeed(stages: int = 4, micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return deepspeed(micro_batches, range(stages), _transfers(stages), recompute)


def _in_one_place(family: Family) -> Callable[..., Schedule]:
    def build(stages: int = 4, micro_batches: int = 8) -> Schedule:
        return _built(family, stages, micro_batches, 1)

    return build


def _in_loops(family: Family) -> Callable[..., Schedule]:
    def build(stages: int = 4, micro_batches: int = 8, chunks: int = 2) -> Schedule:
        return _built(family, stages, micro_batches, chunks)

    return build


def _in_a_v(family: Family) -> Callable[..., Schedule]:
    def build(stages: int = 8, micro_batches: int = 8) -> Schedule:
        return _built(family, stages, micro_batches, 2)

    return build


def _built(family: Family, stages: int, micro_batches: int, each: int) -> Schedule:
    if stages % each:
        less = stages - stages % each
        near = tuple({"stages": k} | _right(family, micro_batches, k // each) for k in (less, less + each) if k)
        raise ProblemError(Problem("stages", stages, f"is no multiple of the {each} on each device", near))
    devices = stages // each
    if problem := family.refuses(micro_batches, devices):
        fixes = tuple({"micro_batches": fix["batch.micro_batches"]} for fix in problem.fixes)
        raise ProblemError(Problem("micro_batches", micro_batches, problem.message, fixes))
    return family.build(micro_batches, devices, each, _transfers(stages))


def _right(family: Family, micro_batches: int, devices: int) -> Fix:
    """Another number of micro-batches, where a family does not have this one on so many devices."""
    problem = family.refuses(micro_batches, devices)
    return {"micro_batches": problem.fixes[0]["batch.micro_batches"]} if problem else {}


def _data_parallel(micro_batches: int = 8, recompute: str = "never", kind: str = SHARDINGS[0]) -> Schedule:
    return data_parallel(micro_batches, 0, 2, cast(Sharding, kind), recompute)


def _single(micro_batches: int = 8, recompute: str = "never") -> Schedule:
    return single(micro_batches, recompute)


ALSO_CALLED = {"1f1b": "one_f_one_b", "interleaved1f1b": "interleaved"}
"""Values of `engine.schedule` that have another name here."""
MAKERS = {"one": _in_one_place, "loop": _in_loops, "v": _in_a_v}
FURTHER = ("zbv", "eager_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "v_half", "v_min", "dualpipev")
"""Families that have no further keys."""
DRAWN: dict[str, Callable[..., Schedule]] = {
    "gpipe": _gpipe,
    "one_f_one_b": _one_f_one_b,
    "interleaved": _interleaved,
    "message_driven": _message_driven,
    "myelin": _myelin,
    "fill_drain": _fill_drain,
    "deepspeed": _deepspeed,
    **{name: MAKERS[FAMILIES[name].places](FAMILIES[name]) for name in FURTHER},
    "data_parallel": _data_parallel,
    "single": _single,
}


def drawing(arguments: Sequence[str]) -> str:
    """Returns the grid of the schedule that the command line names, its numbers, and its queues if more than tasks
    block a device; writes it to each `out`.

    Raises ProblemError in the user's keys.
    """
    outs = [text.removeprefix("out=") for text in arguments if text.startswith("out=")]
    for path in outs:
        schedule_files.writer(path)
    name, *typed = [text for text in arguments if not text.startswith("out=")] or [""]
    if action_file.is_file(name):
        if typed:
            raise ProblemError(Problem(typed[0], None, "is no key of a file", hint=f"{COMMAND} {name} out=own.png"))
        schedule, more, actions = schedule_files.read(name), schedule_files.remarks(name), action_file.read(name)
    else:
        schedule, more, actions = _named(name, typed), [], None
    ops = [(queue.name, op) for queue in schedule.queues for op in queue.ops if op.kind not in COMPUTE]
    hidden = any(queue == "compute" or op.peer is None for queue, op in ops)
    one = replace(schedule, replicas=1)  # all replicas are equal
    blocks = [grid(one), "\n".join([schedule_files.facts(one), *more]), *([schedule.text()] if hidden else [])]
    for path in outs:
        schedule_files.save(one, path, actions)
    return "\n\n".join([*blocks, *(["\n".join(f"written  {path}" for path in outs)] if outs else [])])


def _named(name: str, typed: Sequence[str]) -> Schedule:
    """Returns the schedule of a name, with what was typed after it."""
    if name not in DRAWN:
        hint = f"{COMMAND} {ALSO_CALLED.get(name.lower(), 'gpipe')}"
        raise ProblemError(Problem(name or "schedule", None, f"is not one of {', '.join(DRAWN)}", hint=hint))
    keys = inspect.signature(DRAWN[name]).parameters
    parted = [argument.partition("=") for argument in typed]
    valid = {key: text for key, equals, text in parted if equals and key in keys}
    values = {key: _value(key, text) for key, text in valid.items()}
    for argument, (key, equals, _) in zip(typed, parted, strict=True):
        if not equals or key not in keys:
            why = f"is not KEY=VALUE of {name}, whose keys are {', '.join(keys)}"
            fix = " ".join([COMMAND, name, *(f"{key}={text}" for key, text in valid.items())])
            raise ProblemError(Problem(argument, None, why, hint=fix))
    return DRAWN[name](**values)


def _value(key: str, text: str) -> str | int:
    if key in CHOICES:
        choices, default = CHOICES[key]
        if text not in choices:
            raise ProblemError(Problem(key, text, f"is not one of {', '.join(choices)}", ({key: default},)))
        return text
    if key in ("dependency", "offload"):
        if text not in ("true", "false"):
            raise ProblemError(Problem(key, text, "is neither true nor false", ({key: True},)))
        return text == "true"
    if not text.isdecimal() or int(text) < 1:
        raise ProblemError(Problem(key, text, "is not a whole number of at least 1", ({key: 4},)))
    return int(text)


def main() -> int:
    """Draws the schedule of the command line. Returns 2 where it names none, else 0."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        print(drawing(arguments))
    except ProblemError as error:
        print(f"{error}\n\nMore: {COMMAND} --help", file=sys.stderr)
        return 2
    return 0


def grid(schedule: Schedule) -> str:
    """Draws a row for each device, a column for each time slot; every op starts as early as the schedule allows.

    time      0   1   2   3   4   5   6   7   8
    device 0  0F0 0F1 .   .   0B0---- .   0B1----
    device 1  .   1F0 1B0---- 1F1 1B1---- .   .

    Forward tasks and recomputations take one slot, backward tasks two (where the weights' gradients are tasks of their
    own, one each). Messages and the optimizer take no time and are not drawn. Raises `Deadlock` where the schedule
    cannot end.
    """
    if not schedule.devices:
        return ""
    rows: dict[int, list[tuple[int, int, str]]] = {device: [] for device in sorted(set(schedule.devices))}
    for span in schedule_files.unit_time(schedule).spans:
        kind = span.parsed.kind
        if kind in COMPUTE and kind != "step":
            start, end = (round(at_s / schedule_files.SLOT_S) for at_s in (span.start_s, span.end_s))
            rows[span.device].append((start, end, span.op))
    return _drawn(rows)


def _drawn(rows: dict[int, list[tuple[int, int, str]]]) -> str:
    """Formats `rows`: (first slot, slot after the last, text) of each task, by device."""
    slots = max((end for tasks in rows.values() for _, end, _ in tasks), default=0)
    texts = [text for tasks in rows.values() for _, _, text in tasks]
    width = 1 + max(map(len, [*texts, str(slots - 1)]))
    lines = [("time", "".join(f"{slot:<{width}}" for slot in range(slots)))]
    for device, tasks in rows.items():
        row, reached = "", 0
        for start, end, text in sorted(tasks):
            row += f"{IDLE:<{width}}" * (start - reached)
            row += text.ljust((end - start) * width - 1, "-" if end > start + 1 else " ") + " "
            reached = end
        lines.append((f"device {device}", row + f"{IDLE:<{width}}" * (slots - reached)))
    margin = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{margin}}  {row}".rstrip() for name, row in lines)
