"""The points of MadPipe's sweeps, with their records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from analysis import match_records
from harness.core.record import RunRecord

SWEEPS = ("fig6", "fig7", "fig8")
ALL_OF_THEM, BAND = "published", "activations"
"""The sweep of the paper's own planner on every instance, and that with other sizes of activations."""
FOLDERS = [f"madpipe_{name}" for name in (*SWEEPS, ALL_OF_THEM, BAND)]
"""Names of the sweeps' folders in runs/."""
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "inception_v3": "Inception",
    "densenet121": "DenseNet-121",
}
"""Networks by the names of their profiles."""
PERCENTS = (75, 125)
"""Sizes of the activations in the profiles of the band."""
ESTIMATES = {"optimizer": "its optimizer's", "position": "by position", "devices": "P everywhere", "none": "none"}
"""Memory estimates of PipeDream's partition. "At most P activations for all layers" in the paper's words."""
PUBLISHED, EXACT, CONTIGUOUS = "MadPipe, as published", "MadPipe, exact", "best contiguous"
"""The paper's planner, ours, and the best plan of consecutive stages."""
PIPEDREAM = {name: f"PipeDream, memory {title}" for name, title in ESTIMATES.items()}
BASELINE, SENTENCE = PIPEDREAM["optimizer"], PIPEDREAM["devices"]
"""The reading of PipeDream that decides: that of its public code. The literal reading of the paper's sentence has no
plan at all for little memory, where Figure 6 has some."""

Instance = tuple[str, int, int, int]
"""Network, devices, GB of each, GB/s of links."""


class Row(match_records.Row):
    """One instance: a network on so many devices with so much memory, and one planner."""

    @property
    def network(self) -> str:
        return NETWORKS[self["profile"].rpartition("/")[2].partition("_1000")[0]]

    @property
    def percent(self) -> int:
        """The size of its activations, in percent of the profile's own."""
        _, _, scaled = self["profile"].removesuffix(".json").partition("_activations_")
        return int(scaled or 100)

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
        return {"contiguous": CONTIGUOUS, "madpipe": PUBLISHED if published else EXACT}[planner]

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
    def one_device_s(self) -> float:
        """All work of a mini-batch: U(1,L) of the paper."""
        return float(self.predicted["one_device_s"])

    @property
    def proven(self) -> bool:
        """Whether there is a plan, whose integer programs ended with a proof and not at their time limit."""
        return self.ok and bool(self.predicted["finished"])

    @property
    def several(self) -> int:
        """Number of devices that have several stages."""
        devices = [stage["device"] for stage in self.plan["stages"]] if self.plan else []
        return sum(devices.count(device) > 1 for device in set(devices))

    @property
    def speedup(self) -> float:
        """Over one device with memory enough."""
        return self.one_device_s / self.period_s if self.ok else 0.0


Schemes = dict[str, dict[Instance, Row]]


class Results(match_records.Points[Row]):
    """The records of the paper's sweeps."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        super().__init__("madpipe", Row, FOLDERS, records)
        published = self.rows(ALL_OF_THEM)
        self._schemes = {sweep: _by_scheme([*self.rows(sweep), *self._same(sweep, published)]) for sweep in SWEEPS}
        self._band = {
            percent: _by_scheme(self.rows(BAND, lambda row, percent=percent: row.percent == percent))  # type: ignore[misc]
            for percent in PERCENTS
        }

    def by_scheme(self, sweep: str) -> Schemes:
        """The rows that have been run, of each scheme by instance; the paper's planner on the sweep's instances."""
        return self._schemes[sweep]

    def with_activations(self, percent: int) -> Schemes:
        """The same where activations have this percentage of their size."""
        return self._band[percent]

    def _same(self, sweep: str, rows: Iterable[Row]) -> list[Row]:
        """The rows whose instances a sweep has."""
        instances = {row.instance for row in self.rows(sweep)}
        return [row for row in rows if row.instance in instances]


def _by_scheme(rows: Iterable[Row]) -> Schemes:
    schemes: Schemes = {}
    for row in rows:
        if row.ran:
            schemes.setdefault(row.scheme, {})[row.instance] = row
    return schemes


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios))
