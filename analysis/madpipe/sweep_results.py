"""The points of the sweeps madpipe_fig6 to madpipe_fig8, with their records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from analysis import match_records
from harness.core.record import RunRecord

SWEEPS = ("fig6", "fig7", "fig8")
FOLDERS = [f"madpipe_{name}" for name in SWEEPS]
"""Names of the sweeps' folders in runs/."""
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "inception_v3": "Inception",
    "densenet121": "DenseNet-121",
}
"""Networks by the names of their profiles."""
ESTIMATES = {"optimizer": "its optimizer's", "position": "by position", "devices": "P everywhere", "none": "none"}
"""Memory estimates of PipeDream's partition."""
MADPIPE, PUBLISHED, CONTIGUOUS = "MadPipe", "MadPipe, as published", "best contiguous"
PIPEDREAM = {name: f"PipeDream, memory {title}" for name, title in ESTIMATES.items()}

Instance = tuple[str, int, int, int]
"""Network, devices, GB of each, GB/s of links."""


class Row(match_records.Row):
    """One instance: a network on so many devices with so much memory, and one planner."""

    @property
    def network(self) -> str:
        return NETWORKS[self["profile"].rpartition("/")[2].removesuffix("_1000.json")]

    @property
    def devices(self) -> int:
        return int(self["cluster.devices"])

    @property
    def memory_gb(self) -> int:
        return int(self["cluster.memory_gb"])

    @property
    def bandwidth_gb_s(self) -> int:
        return int(self["cluster.bandwidth_gb_s"])

    @property
    def scheme(self) -> str:
        planner = self["planner"]
        if planner == "pipedream":
            return PIPEDREAM[self["planner.estimate"] or "optimizer"]
        published = self["planner.allocation"] == "published"
        return {"contiguous": CONTIGUOUS, "madpipe": PUBLISHED if published else MADPIPE}[planner]

    @property
    def instance(self) -> Instance:
        return self.network, self.devices, self.memory_gb, self.bandwidth_gb_s

    @property
    def period_s(self) -> float:
        """Infinite where no plan fits."""
        return float(self.predicted["period_s"]) if self.ok else math.inf

    @property
    def first_phase_s(self) -> float:
        """The period that the partition or allocation was chosen for: the paper's dashed lines."""
        return float(self.predicted["first_phase_s"]) if self.ok else math.inf

    @property
    def several(self) -> int:
        """Number of devices that have several stages."""
        devices = [stage["device"] for stage in self.plan["stages"]] if self.plan else []
        return sum(devices.count(device) > 1 for device in set(devices))

    @property
    def speedup(self) -> float:
        """Over one device with memory enough."""
        return float(self.predicted["one_device_s"]) / self.period_s if self.ok else 0.0


Schemes = dict[str, dict[Instance, Row]]


class Results(match_records.Points[Row]):
    """The records of the paper's sweeps."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        super().__init__("madpipe", Row, FOLDERS, records)
        self._schemes = {sweep: self._by_scheme(sweep) for sweep in SWEEPS}

    def by_scheme(self, sweep: str) -> Schemes:
        """The rows that have been run, of each scheme by instance."""
        return self._schemes[sweep]

    def _by_scheme(self, sweep: str) -> Schemes:
        by_scheme: Schemes = {}
        for row in self.rows(sweep):
            if row.ran:
                by_scheme.setdefault(row.scheme, {})[row.instance] = row
        return by_scheme


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios))
