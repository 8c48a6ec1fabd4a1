"""The race of all engines on three models: `mode=race` (harness/races) with these models and schemes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analysis.bench.results import BASE, DEVICES
from analysis.bench.round_robin import Times
from harness.core.record import RunRecord
from harness.host import devices
from harness.races.entries import Entry
from harness.races.race import hold
from harness.races.result import Result
from harness.report import comparison

Row = dict[str, Any]
SHARED = (f"cluster.devices={DEVICES}", "optimizer.lr=0.01", "tracker=none")
BATCH = ("batch.size=16", "batch.micro_batch_size=2")
MODELS = {
    "U-Net": ("model=unet", *BATCH),
    "GPT": ("model=gpt", "model.hidden=256", "model.sequence=128", *BATCH),
    "AmoebaNet-D": (
        "model=amoebanet",
        "model.channels=64",
        "model.size=128",
        "batch.size=16",
        "batch.micro_batch_size=2",
    ),
}
"""Small, but with kernels of a millisecond: below that the interpreter is what is measured."""
ON_GPUS = {
    "U-Net": ("model=unet_5_64", "batch.size=32", "batch.micro_batch_size=4"),
    "GPT": ("model=gpt_110m", "batch.size=32", "batch.micro_batch_size=4"),
    "AmoebaNet-D": ("model=amoebanet_18_208", "batch.size=32", "batch.micro_batch_size=4"),
}
"""Variant of the benchmark for a machine with GPUs."""
SCHEMES = {
    BASE: ("engine=single",),
    "single, all threads": ("engine=single", "engine.threads=0"),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never"),
    "torchgpipe": ("engine=torchgpipe", "engine.checkpoint=never"),
    "torch_pipelining, GPipe": ("engine=torch_pipelining", "engine.schedule=gpipe"),
    "torch_pipelining, 1F1B": ("engine=torch_pipelining", "engine.schedule=1f1b"),
    "torch_pipelining, interleaved": ("engine=torch_pipelining", "engine.schedule=interleaved1f1b"),
    "torch_pipelining, ZB-V": ("engine=torch_pipelining", "engine.schedule=zbv"),
    "deepspeed, pipeline": ("engine=deepspeed",),
    "myelin": ("engine=myelin",),
    "sbp": ("engine=sbp", "planner=autoddl", "mesh.tensor=2", "batch.micro_batch_size=4"),  # two devices share each
    "ddp": ("engine=ddp",),
    "fsdp": ("engine=fsdp",),
    "deepspeed, ZeRO 1": ("engine=deepspeed", "engine.zero=1", "mesh.pipeline=1"),
    "deepspeed, ZeRO 2": ("engine=deepspeed", "engine.zero=2"),
    "deepspeed, ZeRO 3": ("engine=deepspeed", "engine.zero=3"),
}
"""The overrides of each entry, by its name in the table."""


def race(rounds: int) -> list[Row]:
    """U-Net, GPT and AmoebaNet-D on two devices over all engines that take them, in turns; `single` is one device.

    Micro-batches have the same size everywhere. No recomputation.
    """
    models = MODELS if devices.detect().kind == "cpu" else ON_GPUS
    return [row for name, keys in models.items() for row in race_model(name, keys, SCHEMES, rounds)]


def race_model(name: str, keys: Sequence[str], schemes: Mapping[str, Sequence[str]], rounds: int) -> list[Row]:
    """Race the schemes on one model for so many rounds; `name` is its name in rows, `keys` choose it and the batch."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "schemes.yaml")
        file.write_text(json.dumps({"schemes": {scheme: [*own] for scheme, own in schemes.items()}}), encoding="utf-8")
        overrides = [f"schemes={file}", *keys, *SHARED, f"steps={rounds}"]
        ((_, result),) = hold(overrides, several=False, out=Path(folder, "race"))
    return [_row(name, one, result) for one in result.entered]


def _row(model: str, one: Entry, result: Result) -> Row:
    """Its figures, or why there are none: "note" if it was refused, "failed" if it ended early."""
    row: Row = {"model": model, "entry": one.name}
    record = one.row.record
    if one.name in result.ratios and record is not None:
        times, found = Times(tuple(one.rounds_s)), result.ratios[one.name]
        row |= {"step": one.step_time_s, "quartiles": [*times.spread_s]}
        row |= {f"speed / {BASE}": found.value, "interval": [found.low, found.high]}
        row |= _of_record(record)
    elif record is not None and record.status == "infeasible":
        row["note"] = "; ".join(problem.statement for problem in record.problems) or record.reason
    else:
        row["failed"] = record.reason.strip().partition("\n")[0] if record else one.row.waits
    return row


def _of_record(record: RunRecord) -> Row:
    """The memory of the fullest device, where the engine counts it, and the samples of batch and micro-batch."""
    peaks = [value for value in record.metrics.get("peak_memory_bytes") or () if value is not None]
    found: Row = {"peak memory": max(peaks)} if peaks else {}
    return found | {"batch": record.config["batch"]["size"], "micro-batch": comparison.micro_batch_size(record)}
