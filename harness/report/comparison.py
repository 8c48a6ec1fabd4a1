"""What distinguishes runs that are compared: micro-batches, recomputation, a busy machine; speed against one device.

engine=single   64 samples/s   1.00     the reference
engine=gpipe    96 samples/s   1.50
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

from harness.core.plan import Mesh
from harness.core.record import RunRecord
from harness.core.units import number
from harness.host import run_queue

REFERENCE = "single"
"""The engine of the reference."""
SAME = ("mode", "model", "profile", "data", "precision")
"""Keys that a run and its reference have in common, in addition to the batch size, the cluster and the machine."""
RECOMPUTATION, NEVER = ("checkpoint", "checkpoint_every"), "never"
"""Keys of engines that say what is recomputed, and their value for nothing."""
CLOSE, TINY_LOSS = 0.01, 1e-3
"""Last losses that differ by more, relative to the larger one, are noted; smaller ones than this count as it."""
DISTURBED = 1.2
"""Computing over what it takes in the quickest steps, and over the prediction, from which on both are noted."""
MEASURED = ("auto", "measured")
"""Values of `costs` with which the layer times of a run were measured on its machine."""
OWN = ("engine", "planner", "mesh", "cluster", "launch", "tracker", "out")
"""Keys that may differ also where there are several references to choose from."""


def mesh(record: RunRecord) -> Mesh | None:
    """The mesh of the devices that the plan uses (`Plan.used`); None where there is no plan."""
    if not record.plan or not record.plan.get("mesh"):
        return None
    used = {stage["device"] for stage in record.plan.get("stages", ())}
    return Mesh(**record.plan["mesh"] | ({"pipeline": len(used)} if used else {}))


def micro_batch_size(record: RunRecord) -> int | None:
    """Samples of a micro-batch, in each replica; None where there is no plan."""
    found, batch = mesh(record), record.config.get("batch") or {}
    count = (record.plan or {}).get("micro_batches")
    return int(batch["size"]) // (found.data * count) if found and count and batch.get("size") else None


def losses(record: RunRecord) -> tuple[float | None, float | None]:
    """Loss of the first and of the last step; None where nothing was trained."""
    return record.metrics.get("first_loss"), record.metrics.get("loss")


def predicted_over_measured(record: RunRecord) -> float | None:
    """Predicted step time / measured step time; None where nothing was measured."""
    ratios: dict[str, float | None] = record.metrics.get("predicted_over_measured") or {}
    return ratios.get("step_time_s")


def is_reference(record: RunRecord) -> bool:
    """Whether it is a run of the reference's engine."""
    return (record.config.get("engine") or {}).get("name") == REFERENCE


def speeds_over_single(records: Sequence[RunRecord | None], sweeps: Sequence[Hashable] = ()) -> list[float | None]:
    """Throughput of each run / that of its reference; None where it has none, or is not ok.

    The reference is the run with engine=single that is ok, has the same `SAME` keys, batch.size and cluster (but for
    the number of devices), and was measured on the same processor or simulated, like the run. Of several, it is the one
    with all of the run's keys but `OWN`; there is none if that leaves several. `sweeps` says to which sweep each run
    belongs: the reference is of the same one.
    """
    homes = sweeps or [None] * len(records)
    works = [_work(record, home) for record, home in zip(records, homes, strict=True)]
    singles: dict[str, _References] = defaultdict(_References)
    for record, work in zip(records, works, strict=True):
        if record and work and is_reference(record):
            singles[work].append(record)
    return [
        singles[work].speed(record) if record and work and work in singles else None
        for record, work in zip(records, works, strict=True)
    ]


def unequal_micro_batches(records: Sequence[RunRecord | None]) -> str:
    """Of runs with the same batch.micro_batches whose replicas make micro-batches of another size: what that changes,
    and the keys that make them equal. Empty where there are none, and where mode=tune has chosen."""
    groups: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for record in records:
        size, found = (micro_batch_size(record), mesh(record)) if record else (None, None)
        if record and size and found and record.config.get("mode") != "tune":
            batch = record.config["batch"]
            groups[_text([batch, *(record.config.get(key) for key in SAME)])].add((found.data, size))
    for text, kinds in groups.items():
        if len({size for _, size in kinds}) > 1:
            return _note(json.loads(text)[0], sorted(kinds))
    return ""


def notes(records: Sequence[RunRecord | None]) -> list[str]:
    """What a reader of a table of these runs must know."""
    found = (
        unequal_losses,
        unequal_micro_batches,
        unequal_recomputation,
        busy_machine,
        disturbed_machine,
        busy_profile,
    )
    return [text for text in (note(records) for note in found) if text]


def unequal_losses(records: Sequence[RunRecord | None]) -> str:
    """Of runs that trained the same: the two of different engines whose last losses are farthest apart, if that is
    more than `CLOSE`. Empty where there are none; what trains with delayed weights is not compared."""
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for record in records:
        ran = record is not None and record.status == "ok" and record.source == "measured"
        last = losses(record)[1] if record and ran and not _delayed(record) else None
        if record and last is not None and math.isfinite(last):
            batch = (record.config.get("batch") or {}).get("size")
            work = {key: value for key, value in _others(record).items() if key != "batch"}
            groups[_text([batch, work])].append((last, (record.config.get("engine") or {}).get("name", "")))
    for found in groups.values():
        pairs = [pair for pair in itertools.combinations(sorted(found), 2) if pair[0][1] != pair[1][1]]
        if not pairs:
            continue
        (low, one), (high, other) = max(pairs, key=lambda pair: pair[1][0] - pair[0][0])
        apart = (high - low) / max(abs(high), abs(low), TINY_LOSS)
        if apart > CLOSE:
            return (
                f"the last losses differ by {100 * apart:.1f} % ({one} {number(low)}, {other} {number(high)}): batch "
                "norm, dropout and, over many steps, rounding can do that, and so can an engine that trains another "
                "model   -> python -m analysis.losses FOLDER, which compares them step by step"
            )
    return ""


def _delayed(record: RunRecord) -> bool:
    """Whether a run has weights that are updated while micro-batches are under way."""
    versions = (record.config.get("engine") or {}).get("versions")
    return versions != "flush" if versions else bool((record.plan or {}).get("pattern"))


def slowed(record: RunRecord) -> float | None:
    """By how much other programs slowed down the measured steps, if so much that it must be known; else None."""
    found: float | None = record.metrics.get("slowed")
    return found if found and found >= run_queue.BUSY else None


def busy_machine(records: Sequence[RunRecord | None]) -> str:
    """Of measured runs some of which had to share their cores with other programs: by how much. Empty without one."""
    ran = _measured(records)
    found = sorted(filter(None, map(slowed, ran)))
    if not found:
        return ""
    return (
        f"{_some(found, ran)} had a busy machine: steps took {_range(found)} times as long as on a quiet one, by what "
        "threads waited for a core, or known work took before and after"
        f"   -> run {_them(found)} again, while nothing else runs"
    )


def disturbed_machine(records: Sequence[RunRecord | None]) -> str:
    """Of measured runs that took longer than predicted since something slowed them down now and then: by how much.
    Empty without one, and for those that `busy_machine` counts."""
    ran = _measured(records)
    found = sorted(filter(None, (disturbed(record) for record in ran if not slowed(record))))
    if not found:
        return ""
    return (
        f"{_some(found, ran)} had slow moments: computing took {_range(found)} times what tasks take in the quickest "
        "steps, and longer than predicted; the neighbors of a virtual machine can do that"
        f"   -> run {_them(found)} again"
    )


def _measured(records: Sequence[RunRecord | None]) -> list[RunRecord]:
    return [record for record in records if record and record.status == "ok" and record.source == "measured"]


def _some(found: Sequence[float], ran: Sequence[RunRecord]) -> str:
    return f"{len(found)} of {len(ran)} runs" if len(ran) > 1 else "this run"


def _them(found: Sequence[float]) -> str:
    return "them" if len(found) > 1 else "it"


def disturbed(record: RunRecord) -> float | None:
    """By how much computing took longer than in the quickest steps, if it took longer than predicted, too."""
    parts, planned = record.metrics.get("parts_s") or {}, record.predicted.get("parts_s") or {}
    computing_s, quickest_s = parts.get("computing"), record.metrics.get("quickest_computing_s")
    if not computing_s or not quickest_s or not planned.get("computing") or not is_predicted_here(record):
        return None
    late = min(computing_s / quickest_s, computing_s / planned["computing"])
    return computing_s / quickest_s if late >= DISTURBED else None


def is_predicted_here(record: RunRecord) -> bool:
    """Whether a prediction is made of layer times measured on the run's machine, so that it can be held against it."""
    simulation = record.manifest.get("simulation") or {}
    return not simulation.get("upper_bound") and record.config.get("costs", "auto") in MEASURED


def busy_profile(records: Sequence[RunRecord | None]) -> str:
    """Of predictions of which some are made of layer times that a busy machine gave: by how much. Empty without one."""
    bases = [record.manifest.get("simulation", {}) for record in records if record and record.status == "ok"]
    known = [basis.get("slowed", 1.0) for basis in bases if basis.get("costs") in ("measured", "scaled")]
    found = sorted(one for one in known if one >= run_queue.BUSY)
    if not found:
        return ""
    who = f"{len(found)} of {len(known)} predictions are" if len(known) > 1 else "the prediction is"
    return (
        f"{who} of layer times measured on a busy machine, about {_range(found)} times what they take alone"
        "   -> remeasure=true, while nothing else runs"
    )


def _range(factors: Sequence[float]) -> str:
    """Factors in ascending order, as text."""
    return " to ".join(dict.fromkeys(f"{factor:.2f}" for factor in (factors[0], factors[-1])))


def unequal_recomputation(records: Sequence[RunRecord | None]) -> str:
    """Of engines of which some recompute activations and others do not: what that changes, and the key that makes them
    equal. Empty where they are equal, or a sweep tries the same values with each engine."""
    groups: dict[str, dict[str, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        if record and record.status == "ok" and record.config.get("engine"):
            work = _text([record.source, *(record.config.get(key) for key in SAME)])
            groups[work][record.config["engine"]["name"]].add(_recomputation(record))
    for engines in groups.values():
        if len({frozenset(value for _, value in found) for found in engines.values()}) > 1:
            return _recomputing(engines)
    return ""


def _recomputation(record: RunRecord) -> tuple[str, str]:
    """The engine's key of recomputation and its value; an engine without one recomputes nothing."""
    engine = record.config["engine"]
    key = next((key for key in RECOMPUTATION if key in engine), "")
    return key, str(engine[key]) if key else NEVER


def _recomputing(engines: Mapping[str, set[tuple[str, str]]]) -> str:
    some = {name: [one for one in sorted(found) if one[1] != NEVER] for name, found in engines.items()}
    who = " and ".join(
        f"{name} ({', '.join(f'{key}={value}' for key, value in found)})" for name, found in some.items() if found
    )
    fixes = [f"engine.{found[0][0]}={NEVER} where engine={name}" for name, found in some.items() if found]
    others = ", ".join(name for name, found in some.items() if not found)
    than = f", not by {others}" if others else ""
    return (
        f"activations are recomputed by {who}{than}: that saves memory and takes time, so neither can be compared"
        f"   -> {', '.join(fixes)}"
    )


def _note(batch: dict[str, int], kinds: Sequence[tuple[int, int]]) -> str:
    """`kinds` are (mesh.data, micro-batch size), the fewest replicas first: the others get the size of these."""
    wanted = kinds[0][1]
    fixes = [
        f"batch.micro_batches={batch['size'] // (data * wanted)} where mesh.data={data}"
        for data, size in kinds
        if size != wanted and batch["size"] % (data * wanted) == 0
    ]
    sizes = " and ".join(map(str, sorted({size for _, size in kinds})))
    why = "batch.micro_batches counts those of each replica. Batch norm and dropout then see other batches, and small"
    return f"micro-batches have {sizes} samples: {why} micro-batches are slower" + (
        f"   -> {', '.join(fixes)}" if fixes else ""
    )


def _work(record: RunRecord | None, home: Hashable) -> str:
    """What a run has in common with its reference, as a text; empty without a throughput to compare."""
    if record is None or record.status != "ok" or not record.metrics.get("throughput"):
        return ""
    config = record.config
    cluster = {key: value for key, value in (config.get("cluster") or {}).items() if key not in ("nodes", "devices")}
    machine = (record.manifest.get("machine") or {}).get("cpu") if record.source == "measured" else None
    size = (config.get("batch") or {}).get("size")
    return _text([str(home), record.source, machine, size, cluster, *(config.get(key) for key in SAME)])


class _References(list[RunRecord]):
    """Runs of the reference with the same work."""

    @cached_property
    def with_others(self) -> dict[str, list[RunRecord]]:
        """Those with the same other keys."""
        found: dict[str, list[RunRecord]] = defaultdict(list)
        for one in self:
            found[_text([_others(one)])].append(one)
        return found

    def speed(self, record: RunRecord) -> float | None:
        """Throughput of a run / that of its reference; None where there is none, or are several."""
        found = self if len(self) == 1 else self.with_others.get(_text([_others(record)]), [])
        return float(record.metrics["throughput"] / found[0].metrics["throughput"]) if len(found) == 1 else None


def _others(record: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in record.config.items() if key not in OWN}


def _text(values: Sequence[Any]) -> str:
    return json.dumps(values, sort_keys=True)
