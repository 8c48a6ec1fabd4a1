"""What tables and pictures read of a record, by its type: a record whose fields are others is skipped by name.

RunRecord leaves `config`, `plan`, `metrics`, `predicted` and `manifest` open. Here each of their keys that is known has
a type; keys that are not known are not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from harness.config import registry
from harness.config.schema import Config
from harness.core.record import RunRecord
from harness.core.serialization import SchemaError, decode

Number = float | None
Numbers = tuple[float, ...] | None
ByName = dict[str, float]
FIGURES: dict[str, Any] = {
    **dict.fromkeys(("step_time_s", "throughput", "bubble_fraction", "period_s", "collective_s", "loss"), Number),
    **dict.fromkeys(("first_loss", "tokens_per_s", "data_wait_s", "model_flops_per_s", "percent_of_peak"), Number),
    **dict.fromkeys(("hardware_flops_per_s", "hardware_percent_of_peak", "communication_s", "held_bytes"), Number),
    **dict.fromkeys(
        ("one_device_s", "least_s", "least_of_any_s", "contiguous_s", "first_phase_s", "skipped_steps"), Number
    ),
    **dict.fromkeys(("parameters", "in_flight", "threads"), Number),
    **dict.fromkeys(("peak_memory_bytes", "utilization", "activations", "losses", "step_time_spread_s"), Numbers),
    **dict.fromkeys(("bytes_sent", "communication_by_phase_s"), ByName),
    **dict.fromkeys(("alpha_s", "bandwidth_gb_s"), Number),
    **dict.fromkeys(("r2", "r2_large"), dict[str, Number]),
    "weights": str,
    "phases_s": ByName | None,
    "peaks": tuple[dict[str, Any], ...],
    "tuned": dict[str, Any],
    "baselines": dict[str, Any],
    "products": dict[str, Any],
    "finished": bool,
}
"""Of `metrics` and `predicted`, measured, simulated or planned."""
MANIFEST: dict[str, Any] = {
    "overrides": tuple[str, ...],
    "start_time": str,
    "layer_times": str,
    "machine": dict[str, Any],
    "versions": dict[str, Any],
    "simulation": dict[str, Any],
}
SIMULATION: dict[str, Any] = {"layer_times": str, "note": str, "model": str, "costs": str, "cluster": dict[str, Any]}
PLAN: dict[str, Any] = {
    "mesh": dict[str, int],
    "micro_batches": int,
    "stages": tuple[dict[str, Any], ...],
    "strategy": dict[str, tuple[int, ...]],
    "recompute": str,
}
NEEDED = ("mode", "batch", "mesh", "profile")
"""Of a configuration, in addition to the groups: what identifies a run."""
MEASURED = ("step_time_s", "throughput")
"""What a run or a simulation that ended well has among its metrics, as a number; the next three are there, too."""
THERE = ("peak_memory_bytes", "phases_s", "bubble_fraction")
TUNED = ("data", "pipeline", "tensor", "micro_batch", "micro_batches", "candidates", "closed_form_step_time_s")
CALIBRATED = ("alpha_s", "bandwidth_gb_s")
PERIODS = ("period_s", "one_device_s")
PLANNED = {
    **dict.fromkeys(("madpipe", "pipedream"), (*PERIODS, "first_phase_s")),
    "contiguous": PERIODS,
    **dict.fromkeys(("autoddl", "strategies", "megatron", "data_parallel", "summa"), ("communication_s",)),
}
"""By planner, what a plan predicts, as a number."""


def check(record: RunRecord) -> None:
    """Raise SchemaError for the first field that has another type than those that read it expect."""
    _known(FIGURES, record.metrics, "metrics")
    _known(FIGURES, record.predicted, "predicted")
    _known(MANIFEST, record.manifest, "manifest")
    _known(SIMULATION, record.manifest.get("simulation", {}), "manifest.simulation")
    if record.plan is not None:
        _known(PLAN, record.plan, "plan")
        mesh = record.plan.get("mesh", {})
        if min(mesh.values(), default=1) < 1 or set(mesh) - {"data", "pipeline", "tensor"}:
            raise SchemaError(f"plan.mesh: expected degrees of at least 1, got {str(mesh)[:80]!r}")
    if record.config:
        _config(record.config)
        if record.status == "ok":
            _complete(record)


def _complete(record: RunRecord) -> None:
    """What a record of its mode has that ended well."""
    mode, metrics = record.config["mode"], record.metrics
    if mode in ("run", "simulate"):
        _numbers(MEASURED, metrics, "metrics")
        if missing := [name for name in THERE if name not in metrics]:
            raise SchemaError(f"metrics.{missing[0]}: expected a value or null, got nothing")
    if mode == "run":
        ratios = decode(dict[str, Any], metrics.get("predicted_over_measured"), "metrics.predicted_over_measured")
        kinds = {"step_time_s": Number, "peak_memory_bytes": Numbers}
        _known(kinds, dict.fromkeys(kinds) | ratios, "metrics.predicted_over_measured")
    if mode == "tune":
        _numbers(TUNED, decode(dict[str, Any], metrics.get("tuned"), "metrics.tuned"), "metrics.tuned")
    if mode == "calibrate":
        _numbers(CALIBRATED, metrics, "metrics")
        decode(str, metrics.get("weights"), "metrics.weights")
    if mode == "plan":
        _numbers(PLANNED.get(record.config["planner"]["name"], ()), record.predicted, "predicted")
    if mode in ("plan", "run", "simulate", "tune") and not (record.plan or {}).get("mesh"):
        raise SchemaError("plan.mesh: expected its degrees, got nothing")


def _numbers(names: Iterable[str], values: Mapping[str, Any], path: str) -> None:
    for name in names:
        decode(float, values.get(name), f"{path}.{name}")


def _known(kinds: Mapping[str, Any], values: Mapping[str, Any], path: str) -> None:
    for name, value in values.items():
        if name in kinds:
            decode(kinds[name], value, f"{path}.{name}")


def _config(config: dict[str, Any]) -> None:
    """Each key has the type that a configuration gives it, where it has that key still; each group has its name."""
    for name, kind in _kinds(Config).items():
        if name in registry.GROUPS:
            group = decode(dict[str, Any], config.get(name), f"config.{name}")
            plugin = decode(str, group.get("name"), f"config.{name}.name")
            schema = registry.schemas().get((name, name if name in registry.SCHEMAS else plugin))
            if schema:
                _fields(schema, group, f"config.{name}")
        elif name in config or name in NEEDED:
            _field(kind, config.get(name), f"config.{name}")


def _fields(kind: type, values: dict[str, Any], path: str) -> None:
    for name, hint in _kinds(kind).items():
        if name in values:
            _field(hint, values[name], f"{path}.{name}")


def _field(kind: Any, value: Any, path: str) -> None:
    if dataclasses.is_dataclass(kind):
        _fields(typing.cast(type, kind), decode(dict[str, Any], value, path), path)
    else:
        decode(kind, value, path)


@functools.cache
def _kinds(kind: type) -> dict[str, Any]:
    """The type of each key of a dataclass, as JSON has it."""
    hints = typing.get_type_hints(kind)
    lists = {
        name: tuple[*typing.get_args(hint), ...] for name, hint in hints.items() if typing.get_origin(hint) is list
    }
    return {field.name: (hints | lists)[field.name] for field in dataclasses.fields(kind) if field.name != "defaults"}
