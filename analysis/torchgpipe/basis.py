"""What figures rest on, in words: the cluster and layer times of a simulation, the machine of a measurement."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.record import RunRecord


def simulation(record: RunRecord) -> str:
    basis = record.manifest.get("simulation", {})
    cluster, times = basis.get("cluster", {}).get("name", "?"), basis.get("layer_times", "?")
    return f"Simulated on {cluster}; layer times {times}."


def measurement(records: Iterable[RunRecord]) -> str:
    machine = next(iter(records)).manifest.get("machine", {})
    return f"Measured on {machine.get('cpu', 'a CPU')} with {machine.get('cores_allowed', '?')} cores"


def listed(records: Iterable[RunRecord], group: str, key: str) -> str:
    """The values of GROUP.KEY in the records."""
    return ", ".join(map(str, sorted({record.config[group][key] for record in records})))


def failure(record: RunRecord) -> str:
    return f"{record.status}: {' '.join(record.reason.split())}"
