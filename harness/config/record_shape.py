"""What tables and pictures read of a record, by its type: a record whose fields are others is skipped by name.

RunRecord leaves `config`, `plan`, `metrics`, `predicted` and `manifest` open. Here each of their keys that is known has
a type; keys that are not known are not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import types
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
    **dict.fromkeys(
        (
            "tokens_per_s_per_device",
            "hardware_flops_per_s",
            "hardware_percent_of_peak",
            "data_sheet_percent_of_peak",
            "communication_s",
            "held_bytes",
        ),
        Number,
    ),
    **dict.fromkeys(
        ("one_device_s", "least_s", "least_of_any_s", "whole_s", "contiguous_s", "first_phase_s", "skipped_steps"),
        Number,
    ),
    **dict.fromkeys(("parameters", "in_flight", "threads", "slowed", "quickest_computing_s"), Number),
    "reserved_memory_bytes": Numbers,
    **dict.fromkeys(("peak_memory_bytes", "utilization", "activations", "losses", "step_time_spread_s"), Numbers),
    **dict.fromkeys(("bytes_sent", "collectives", "communication_by_phase_s"), ByName),
    **dict.fromkeys(("alpha_s", "bandwidth_gb_s"), Number),
    **dict.fromkeys(("r2", "r2_large"), dict[str, Number]),
    "weights": str,
    **dict.fromkeys(("phases_s", "parts_s"), ByName | None),
    "peaks": tuple[dict[str, Any], ...],
    "tuned": dict[str, Any],
    "baselines": dict[str, Any],
    "products": dict[str, dict[str, Any]],
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
SIMULATION: dict[str, Any] = {
    **dict.fromkeys(("layer_times", "note", "model", "costs"), str),
    **dict.fromkeys(("slowed", "lock_share"), Number),
    "upper_bound": bool,
    "cluster": dict[str, Any],
}
PLAN: dict[str, Any] = {
    "mesh": dict[str, int],
    "micro_batches": int,
    "stages": tuple[dict[str, Any], ...],
    "strategy": dict[str, tuple[int, ...]],
    "recompute": str,
}
MEASURED = ("step_time_s", "throughput")
"""What a run or a simulation that ended well has among its metrics, as a number."""
TUNED = ("data", "pipeline", "tensor", "micro_batch", "micro_batches", "candidates", "closed_form_step_time_s")
CALIBRATED = ("alpha_s", "bandwidth_gb_s")
PERIODS = ("period_s", "one_device_s")
PLANNED = {
    **dict.fromkeys(("madpipe", "pipedream"), (*PERIODS, "first_phase_s")),
    "contiguous": PERIODS,
    **dict.fromkeys(("autoddl", "strategies", "megatron", "data_parallel", "summa"), ("communication_s",)),
}
"""By planner, what a plan predicts, as a number."""


def check_types(record: RunRecord) -> None:
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


def check_identified(record: RunRecord) -> None:
    """Raise SchemaError for a configuration that lacks what is in a title; a run that was not composed has none."""
    if record.config:
        _needs(("mode", "profile", "engine", "model", "cluster"), record.config, "config")


def check_complete(record: RunRecord) -> None:
    """Raise SchemaError for a record that ended well and lacks what the tables of a paper read.

    One without overrides is no point of a sweep, and in no table.
    """
    check_identified(record)
    if record.status != "ok" or not record.manifest.get("overrides"):
        return
    _needs(("batch", "mesh", "planner"), record.config, "config")
    mode, metrics, planner = record.config["mode"], record.metrics, record.config["planner"]["name"]
    for key, value in (("mode", mode), ("planner", planner)):
        if f"{key}={value}" not in (given := _given(record, key)) and given:
            raise SchemaError(f"config.{key}: expected {given[-1]}, got {value!r}")
    if mode in ("run", "simulate"):
        _numbers(MEASURED, metrics, "metrics")
        _needs(("peak_memory_bytes", "phases_s", "bubble_fraction"), metrics, "metrics")
    if mode == "run":
        ratios = decode(dict[str, Any], metrics.get("predicted_over_measured"), "metrics.predicted_over_measured")
        kinds = {"step_time_s": Number, "peak_memory_bytes": Numbers}
        _known(kinds, dict.fromkeys(kinds) | ratios, "metrics.predicted_over_measured")
    if mode == "tune":
        _numbers(TUNED, decode(dict[str, Any], metrics.get("tuned"), "metrics.tuned"), "metrics.tuned")
    if mode == "calibrate":
        _numbers(CALIBRATED, metrics, "metrics")
        weights = decode(str, metrics.get("weights"), "metrics.weights")
        for name in ("r2", "r2_large"):
            _numbers([weights], decode(dict[str, Any], metrics.get(name), f"metrics.{name}"), f"metrics.{name}")
    if mode in ("plan", "run", "simulate", "tune"):
        _needs(("mesh",), record.plan or {}, "plan")
        _numbers(PLANNED.get(planner, ()), record.predicted, "predicted")
    if mode == "plan" and planner in ("autoddl", "strategies"):
        _needs(("products",), record.predicted, "predicted")


def _needs(names: Iterable[str], values: Mapping[str, Any], path: str) -> None:
    """A value of each name, or null."""
    for name in names:
        if name not in values:
            raise SchemaError(f"{path}.{name}: expected a value, got nothing")


def _given(record: RunRecord, key: str) -> list[str]:
    """The overrides of a key."""
    return [text for text in record.manifest.get("overrides", ()) if text.startswith(f"{key}=")]


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
        if name not in config:
            continue
        if name in registry.GROUPS:
            group = decode(dict[str, Any], config[name], f"config.{name}")
            plugin = decode(str, group.get("name"), f"config.{name}.name")
            schema = registry.schemas().get((name, name if name in registry.SCHEMAS else plugin))
            if schema:
                _fields(schema, group, f"config.{name}")
        else:
            _field(kind, config[name], f"config.{name}")


def _fields(kind: type, values: dict[str, Any], path: str) -> None:
    for name, hint in _kinds(kind).items():
        if name in values:
            _field(hint, values[name], f"{path}.{name}")


def _field(kind: Any, value: Any, path: str) -> None:
    if dataclasses.is_dataclass(kind):
        _fields(typing.cast(type, kind), decode(dict[str, Any], value, path), path)
    else:
        if type(value) not in _exact(kind):
            decode(kind, value, path)


@functools.cache
def _exact(kind: Any) -> frozenset[type]:
    """The types of values that need no closer look: there are thousands of records with dozens of keys each."""
    either = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return frozenset(typing.get_args(kind) if either else (kind,)) & {str, bool, float, type(None)}


@functools.cache
def _kinds(kind: type) -> dict[str, Any]:
    """The type of each key of a dataclass, as JSON has it."""
    hints = typing.get_type_hints(kind)
    return {field.name: _in_json(hints[field.name]) for field in dataclasses.fields(kind) if field.name != "defaults"}


def _in_json(hint: Any) -> Any:
    """list[int] -> tuple[int, ...], also as one of several types."""
    if typing.get_origin(hint) is list:
        return types.GenericAlias(tuple, (*typing.get_args(hint), ...))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_in_json, typing.get_args(hint)))]  # noqa: UP007
    return hint
