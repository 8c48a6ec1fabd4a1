"""A point of a sweep as a row of its table: where it stands, and its figures as texts and as numbers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.core.plan import Mesh, Plan
from harness.core.problem import spelled
from harness.core.record import RunRecord
from harness.core.units import AT_MOST, UNKNOWN, number, percent, rate, seconds, size
from harness.report import comparison
from harness.report.closing_table import ending
from harness.sweep.points import Point

UNIT = "samples/s"
PREDICTED = "~"
FIGURES = ("throughput", "step_time_s", "peak_memory_bytes", "bubble_fraction", "devices", "period_s")
"""The figures of a point in the file, by their names there."""
FURTHER = (
    "first_loss",
    "last_loss",
    "predicted_step_time_s",
    "predicted_over_measured",
    "pipeline_parallel_size",
    "data_parallel_size",
    "tensor_parallel_size",
    "micro_batch_size",
)
"""What the file has of a point after `FIGURES`; `predicted_over_measured` is that of the step time."""


@dataclass
class Row:
    """One point: waiting without `began_s`, running without `record`.

    `before` if an earlier start finished it. `waits` is what it does without either, `waits_for` why, as a batch system
    says, and `log` what that kept.
    """

    point: Point
    began_s: float | None = None
    record: RunRecord | None = None
    before: bool = False
    waits: str = UNKNOWN
    waits_for: str = ""
    log: Path | None = None

    @property
    def status(self) -> str:
        """ok (simulated), before; pending (Priority)"""
        if self.record is None and self.began_s is None:
            return f"{self.waits} ({self.waits_for})" if self.waits_for else self.waits
        if self.record is None:
            return f"running {time.monotonic() - (self.began_s or 0.0):.0f} s"
        ended = ending(self.record)
        return f"{ended}, before" if self.before else ended

    @property
    def state(self) -> str:
        """ok, oom, pending; "not run" where nobody knows."""
        if self.record:
            return self.record.status
        return "not run" if self.waits == UNKNOWN else self.waits

    @property
    def predicts(self) -> bool:
        """Whether a figure that is shown is only predicted."""
        return any(self._figure(name)[1] for name in FIGURES)

    @property
    def is_bound(self) -> bool:
        """Whether its speed is simulated on a device that is not calibrated."""
        if self.record is None or self.record.source != "simulated" or self.throughput is None:
            return False
        return bool(self.record.manifest.get("simulation", {}).get("upper_bound"))

    def figures(self, unit: str = UNIT) -> tuple[str, str, str]:
        """Throughput in `unit`, step time, memory of the fullest device; "~" is a prediction, "<=" an upper bound."""
        return (
            (AT_MOST if self.is_bound else "") + self._shown("throughput", partial(rate, unit=unit)),
            self._shown("step_time_s", seconds),
            self._shown("peak_memory_bytes", size),
        )

    def extent(self) -> tuple[str, str]:
        """The bubble; the period, where the planner plans one."""
        return self._shown("bubble_fraction", percent), self._shown("period_s", seconds)

    @property
    def losses(self) -> str:
        """0.6734 -> 0.4918, of the first and of the last step."""
        both = comparison.losses(self.record) if self.record else (None, None)
        return UNKNOWN if None in both else " -> ".join(map(number, both))

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the devices that the plan uses."""
        return comparison.mesh(self.record) if self.record else None

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a micro-batch."""
        return comparison.micro_batch_size(self.record) if self.record else None

    @property
    def predicted_over_measured(self) -> float | None:
        """Predicted step time / measured step time."""
        return comparison.predicted_over_measured(self.record) if self.record else None

    @property
    def devices(self) -> int | None:
        """The devices of the plan, with all replicas."""
        if self.record is None or self.record.plan is None:
            return None
        plan = Plan.from_json(self.record.plan)
        return len(plan.devices) * plan.mesh.data * plan.mesh.tensor

    def used(self, key: str) -> str:
        """The value of a key with which the point was run, whether it was given or not."""
        if self.record is None:
            return UNKNOWN
        group, _, name = key.lstrip("+").partition(".")
        if group == "mesh" and self.record.plan and self.record.plan.get("mesh"):
            return str(self.record.plan["mesh"][name])
        if key == "batch.micro_batches" and self.record.plan:
            return str(self.record.plan["micro_batches"])
        value: Any = self.record.config
        for part in filter(None, (group, *name.split("."))):
            value = value.get(part, UNKNOWN) if isinstance(value, dict) else UNKNOWN
        value = value.get("name", UNKNOWN) if isinstance(value, dict) else value
        return UNKNOWN if value == UNKNOWN else spelled(value)

    @property
    def is_reference(self) -> bool:
        """Whether other points are compared with it."""
        return self.record is not None and comparison.is_reference(self.record)

    @property
    def trained(self) -> str:
        """The model with all its keys: samples/s of different ones cannot be compared."""
        return json.dumps(self.record.config.get("model") if self.record else None, sort_keys=True)

    @property
    def throughput(self) -> float | None:
        """Throughput of a point that is ok, else None."""
        return self._figure("throughput")[0] if self.record and self.record.status == "ok" else None

    def numbers(self) -> dict[str, float | None]:
        """`FIGURES` and `FURTHER` in full; of a measured point nothing that was only predicted, but for what is named
        so."""
        found: dict[str, float | None] = dict.fromkeys((*FIGURES, *FURTHER)) | {"devices": self.devices}
        if self.record is None:
            return found
        for name in FIGURES:
            value, predicted = self._figure(name)
            if value is not None and not (predicted and self.record.source == "measured"):
                found[name] = value
        sizes = vars(self.mesh) if self.mesh else {}
        further = (
            *comparison.losses(self.record),
            self.record.predicted.get("step_time_s"),
            self.predicted_over_measured,
            *(sizes.get(name) for name in ("pipeline", "data", "tensor")),
            self.micro_batch_size,
        )
        return found | dict(zip(FURTHER, further, strict=True))

    def _shown(self, name: str, text: Callable[[float | None], str]) -> str:
        value, predicted = self._figure(name)
        return f"{PREDICTED}{text(value)}" if predicted else text(value)

    def _figure(self, name: str) -> tuple[float | None, bool]:
        """A figure of the record (the largest, where it has one for each device), and whether it was only predicted."""
        if self.record is None:
            return None, False
        for predicted, figures in enumerate((self.record.metrics, self.record.predicted)):
            value: Any = figures.get(name)
            if isinstance(value, list):
                value = max((one for one in value if one is not None), default=None)
            if value is not None:
                return value, bool(predicted)
        return None, False
