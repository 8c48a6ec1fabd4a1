"""Figures 9 and 10 and Table 3: schemes side by side, for one model on one cluster.

The paper's protocol: "the largest possible micro-batch" in Figures 9 and 10, the smallest one in Table 3, for each
scheme with its best mesh or strategies. A scheme whose micro-batches are tuned, too, takes the fastest that fit: for
one mesh that is the largest micro-batch again, but another mesh may be the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from analysis.autoddl.sweep_results import Results, Row, largest, smallest
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
Pick = Callable[[Sequence[Row]], Row | None]
"""Which of the points of a scheme counts: `largest`, `smallest` or `fastest`."""
BANDWIDTH = "cluster.node_bandwidth_gb_s"


@dataclass(frozen=True)
class Setting:
    """A model on so many devices, as the paper compares schemes there; `title` names it in tables.

    `gb_s` is another bandwidth of a node, where one is tried.
    """

    sweep: str
    model: str
    key: str
    value: str
    title: str
    devices: int
    gb_s: str = ""

    def rows(self, results: Results, scheme: str) -> list[Row]:
        """The points of a scheme: those of several micro-batches."""
        planner, paths = SCHEMES[scheme]
        return results.rows(
            self.sweep,
            lambda row: (
                row["model"] == self.model
                and row[BANDWIDTH] == self.gb_s
                and row[self.key] == self.value
                and row["planner"] == planner
                and row["planner.paths"] == paths
            ),
        )

    def chosen(self, results: Results, scheme: str, pick: Pick = largest) -> Row | None:
        """The point that counts, by the paper's protocol that with the largest micro-batches. None if none fits, or was
        run."""
        return pick(self.rows(results, scheme))

    def was_run(self, results: Results, scheme: str) -> bool:
        return all(row.ran for row in self.rows(results, scheme))

    def seconds(self, results: Results, of: Callable[[Row], float], pick: Pick = largest) -> dict[str, float]:
        """A figure of each scheme that fits."""
        rows = {scheme: self.chosen(results, scheme, pick) for scheme in SCHEMES}
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
VGG_AT = {gb_s: tuple(replace(setting, gb_s=gb_s) for setting in VGG) for gb_s in ("2", "10")}
"""VGG13 with other bandwidths: what its own times imply, and the data sheet's."""
CLOUD_VGG = tuple(Setting("fig10", "vgg13", DEVICES, str(n), f"VGG13, 2 x {n} GPUs", 2 * n) for n in (4, 8))
SMALL = Setting("fig10", "gpt_24_1024", DEVICES, "", "0.35B, 2 x 16 GPUs", 32)
LARGE = Setting("fig10", "gpt_28_4096", DEVICES, "", "5.8B, 2 x 16 GPUs", 32)
LARGE_SLOW = replace(LARGE, gb_s="6.25")
"""With half of the port's bandwidth."""


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

    def times(self, results: Results, planner: str, pick: Pick = smallest) -> dict[int, float | None]:
        """Seconds of a step by number of stages that were run, with the smallest micro-batches; None: nothing fits."""
        found: dict[int, float | None] = {}
        for stages in (1, 2, 4):
            wanted = {"model": self.model, NODES: str(self.nodes), "planner": planner, "mesh.pipeline": str(stages)}
            rows = [row for row in results.rows("table3") if all(row[key] == wanted[key] for key in wanted)]
            if all(row.ran for row in rows):
                best = pick(rows)
                found[stages] = best.step_s if best else None
        return found


STAGED = tuple(
    Staged(model, nodes, f"{title}, {nodes} nodes")
    for model, title in (("gpt_16_5b", "Transformer Wide"), ("gpt_36_4096", "Transformer Deep"))
    for nodes in (64, 128)
)
