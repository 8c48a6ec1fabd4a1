"""The points of the sweeps myelin_*, with their records."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from analysis import match_records, run_artifacts
from harness.core.plan import Mesh
from harness.core.record import RunRecord

SWEEPS = ("table1", "table2", "fig5", "fig6", "fig8", "fig9", "fig10", "fig11", "ablation")
PAPER, LOCAL = "paper", "local"
"""Scales: simulated as in the paper, and measured in small."""
FOLDERS = [f"myelin_{name}-{scale}" for name, scale in itertools.product(SWEEPS, (PAPER, LOCAL))]
"""The sweeps, as they are called in runs/."""
MYELIN, DEEPSPEED, MEGATRON = "Myelin", "DeepSpeed", "Megatron-LM"
FRAMEWORKS = (MYELIN, DEEPSPEED, MEGATRON)
MODELS = {"gpt_12b": "12B", "gpt_24b": "24B", "gpt_50b": "50B", "gpt_100b": "100B", "gpt_110m": "GPT-2 small"}
SIZES = ("12B", "24B", "50B", "100B")
GPUS = {"12B": 48, "24B": 96, "50B": 192, "100B": 384}
GB = 1e9


class Row(match_records.Row):
    """One point: a model on a mesh."""

    @property
    def size(self) -> str:
        """Name of the model in the paper."""
        return MODELS.get(self["model"], self["model"])

    @property
    def framework(self) -> str:
        if self["engine"] == "deepspeed":
            return MEGATRON if self["engine.zero"] == "0" else DEEPSPEED
        return MYELIN

    @property
    def mesh(self) -> Mesh:
        """Mesh of G_inter stages, G_data replicas and G_intra shards."""
        return Mesh(**self.plan["mesh"])

    @property
    def tuned(self) -> Mesh:
        """The mesh that mode=tune has chosen."""
        return Mesh(**{degree: self.metrics["tuned"][degree] for degree in ("data", "pipeline", "tensor")})

    @property
    def config(self) -> dict[str, Any]:
        return self._record.config

    @property
    def metrics(self) -> dict[str, Any]:
        return self._record.metrics

    def phase_s(self, name: str) -> float:
        """Seconds of "pipelining", "data_parallel" or "optimizer"; 0.0 where there is no trace."""
        return float((self.metrics["phases_s"] or {}).get(name, 0.0))

    @property
    def total_bytes(self) -> int:
        """The fullest moment of each device, over all replicas."""
        return int(sum(self.metrics["peak_memory_bytes"])) * self.mesh.data

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, each counted once. Raises MissingData, as `losses` and `in_flight`
        do."""
        return run_artifacts.parameters(self._record)

    @functools.cached_property
    def losses(self) -> list[float]:
        """Loss of each step, warm-up included."""
        return run_artifacts.losses(self._record)

    @functools.cached_property
    def in_flight(self) -> int:
        """The most micro-batches that any stage has started and not ended at once."""
        return run_artifacts.in_flight(self._record)


class Results(match_records.Points[Row]):
    """The records of the paper's sweeps."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        super().__init__("myelin", Row, FOLDERS, records)

    def good(self, sweep: str, scale: str = PAPER, keep: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        """The points that have been run well, in order."""
        return self.rows(sweep, lambda row: row.ok and keep(row), scale)
