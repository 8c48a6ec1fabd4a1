"""Table 3's search: the largest U-Net (B, C) that fits, for each number of devices."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.torchgpipe.quantities import unet_parameters
from analysis.torchgpipe.sweep_results import Candidate, Results
from harness.core.units import sizes


@dataclass(frozen=True)
class Fits:
    """A U-Net (B, C) that fits."""

    convs: int
    channels: int

    @property
    def parameters(self) -> int:
        return unet_parameters(self.convs, self.channels)

    def __str__(self) -> str:
        return f"({self.convs}, {self.channels}) {billions(self.parameters)}"


def largest(results: Results, row: str) -> Fits | None:
    """None if a candidate of the row has not been run, or none fits."""
    own = [one for one in results.search() if one.row == row]
    if not own or any(one.record is None for one in own):
        return None
    fitting = [Fits(one.convs, one.channels) for one in own if one.record and one.record.status == "ok"]
    return max(fitting, key=lambda one: one.parameters, default=None)


def outcome(candidate: Candidate) -> str:
    """Return the outcome of a candidate, in a few words."""
    record = candidate.record
    if record is None:
        return "not run"
    if record.status == "ok":
        peaks = record.metrics.get("peak_memory_bytes") or [0]
        return f"fits: {max(peaks) / 2**30:.1f} GiB on the fullest device"
    for numbers in (problem.numbers for problem in record.problems):
        if "needed_bytes" in numbers:
            needed, available = sizes(round(numbers["needed_bytes"]), round(numbers["available_bytes"]))
            return f"does not fit: {needed} of {available}"
    return f"{record.status}: {record.reason.splitlines()[0] if record.reason else ''}"


def billions(count: int) -> str:
    """362.2M, 2.21B"""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
