"""Figures 9 and 10 and Table 3: schemes side by side, for one model on one cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from analysis.autoddl.sweep_results import Results, Row, fastest
from analysis.paper_data import printed

SCHEMES = {
    "data parallel": ("data_parallel", ""),
    "Megatron-like": ("megatron", ""),
    "SUMMA": ("summa", ""),
    "AutoDDL": ("autoddl", "paper"),
    "AutoDDL, mixed paths": ("autoddl", "mixed"),
}
"""Planner and planner.paths of each."""
OURS, MIXED = "AutoDDL", "AutoDDL, mixed paths"
BASELINES = ("data parallel", "Megatron-like", "SUMMA")


@dataclass(frozen=True)
class Setting:
    """A model on so many devices, as the paper compares schemes there; `title` names it in tables."""

    sweep: str
    model: str
    key: str
    value: str
    title: str
    devices: int

    def rows(self, results: Results, scheme: str) -> list[Row]:
        """The points of a scheme: those of several micro-batches."""
        planner, paths = SCHEMES[scheme]
        return results.rows(
            self.sweep,
            lambda row: (
                row["model"] == self.model
                and row[self.key] == self.value
                and row["planner"] == planner
                and row["planner.paths"] == paths
            ),
        )

    def chosen(self, results: Results, scheme: str) -> Row | None:
        """The point that counts: that with the fastest micro-batches that fit. None if none fits, or was run."""
        return fastest(self.rows(results, scheme))

    def was_run(self, results: Results, scheme: str) -> bool:
        return all(row.ran for row in self.rows(results, scheme))

    def seconds(self, results: Results, of: Callable[[Row], float]) -> dict[str, float]:
        """A figure of each scheme that fits."""
        rows = {scheme: self.chosen(results, scheme) for scheme in SCHEMES}
        return {scheme: of(row) for scheme, row in rows.items() if row}


def steps(row: Row) -> float:
    return row.step_s


def communication(row: Row) -> float:
    return row.communication_s


NODES, DEVICES = "cluster.nodes", "cluster.devices"
VGG = tuple(Setting("fig9", "vgg13", NODES, str(n), f"VGG13, {n} nodes", n) for n in (16, 32, 64))
TRANSFORMERS = (
    Setting("fig9", "gpt_6_8b", NODES, "64", "6.8B, 64 nodes", 64),
    Setting("fig9", "gpt_16_5b", NODES, "128", "16.5B, 128 nodes", 128),
    Setting("fig9", "gpt_35_8b", NODES, "256", "35.8B, 256 nodes", 256),
)
CLOUD_VGG = tuple(Setting("fig10", "vgg13", DEVICES, str(n), f"VGG13, 2 x {n} GPUs", 2 * n) for n in (4, 8))
SMALL = Setting("fig10", "gpt_24_1024", DEVICES, "", "0.35B, 2 x 16 GPUs", 32)
LARGE = Setting("fig10", "gpt_28_4096", DEVICES, "", "5.8B, 2 x 16 GPUs", 32)


@dataclass(frozen=True)
class Staged:
    """A row of Table 3."""

    model: str
    nodes: int
    title: str

    def published(self, metric: str, scheme: str) -> float:
        """Return the number in the paper's table."""
        model = self.title.partition(",")[0]
        return printed("autoddl_table3_pipeline", metric, scheme=scheme, model=model, devices=self.nodes)

    def times(self, results: Results, planner: str) -> dict[int, float | None]:
        """Seconds of a step by number of stages that were run, with the fastest micro-batches; None: nothing fits."""
        found: dict[int, float | None] = {}
        for stages in (1, 2, 4):
            wanted = {"model": self.model, NODES: str(self.nodes), "planner": planner, "mesh.pipeline": str(stages)}
            rows = [row for row in results.rows("table3") if all(row[key] == wanted[key] for key in wanted)]
            if all(row.ran for row in rows):
                best = fastest(rows)
                found[stages] = best.step_s if best else None
        return found


STAGED = tuple(
    Staged(model, nodes, f"{title}, {nodes} nodes")
    for model, title in (("gpt_16_5b", "Transformer Wide"), ("gpt_36_4096", "Transformer Deep"))
    for nodes in (64, 128)
)
