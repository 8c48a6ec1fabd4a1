"""AutoDDL's points as the paper would have them."""

from __future__ import annotations

from typing import Any

from analysis.autoddl import fig3_fig4
from analysis.autoddl.claim_checks import DENSE
from analysis.autoddl.sweep_results import sweep_points
from harness.core.record import RunRecord

STEPS = {"data_parallel": 4.0, "megatron": 1.1, "summa": 9.0, "paper": 1.0, "mixed": 0.9}
"""Seconds of each scheme, as the paper would have them."""


def record(values: dict[str, str], **changes: Any) -> RunRecord:
    overrides = [f"{key}={value}" for key, value in values.items()]
    basis = {"layer_times": "by hand", "cluster": {"node_port": {"beta_s_per_byte": 1e-10}}}
    fields: dict[str, Any] = {"manifest": {"overrides": [*overrides, "out=here"], "simulation": basis}}
    return RunRecord(**{"id": "x", "status": "ok", "source": "simulated", **fields, **changes})


def plan(**strategy: tuple[int, ...]) -> dict[str, Any]:
    return {"strategy": {name: list(numbers) for name, numbers in strategy.items()}}


def fig3() -> list[RunRecord]:
    found = []
    volumes = {"Megatron": (3.75, (4, 16, 1), (4, 1, 16)), "AutoDDL": (2.0, (4, 8, 2), (4, 4, 4)),
               "found here": (2.0, (4, 8, 2), (4, 4, 4))}  # fmt: skip
    for point, (volume, *numbers) in zip(sweep_points("fig3"), volumes.values(), strict=True):
        size = volume * 2**30 * 4  # forward, half of it for each product; as much backward
        own = {name: {"bytes": {"all_gather": size, "all_reduce": 1}} for name in fig3_fig4.ATTENTION}
        strategy = dict(zip(fig3_fig4.ATTENTION, numbers, strict=True))
        found.append(record(point.values(), plan=plan(**strategy), predicted={"products": own}))
    return found


def fig8() -> list[RunRecord]:
    ends = {"random": 1.3, "metropolis_hastings": 1.05}
    found = []
    for point in sweep_points("fig8"):
        values = point.values()
        best = ends.get(values["planner.search"], 1.0)
        history = [[10, 5.0], [500, best]]
        timed = {"elapsed_s": [0.001, 0.01], "search_s": 0.1, "evaluations": 10_000}
        found.append(record(values, predicted={"communication_s": best, "history": history, **timed}))
    return found


def simulated(name: str) -> list[RunRecord]:
    """Figure 9 or 10 with the order of the paper; the first micro-batches of Transformers do not fit."""
    found = []
    for point in sweep_points(name):
        values = point.values()
        seconds = STEPS[values.get("planner.paths", values["planner"])]
        if values["model"] == "vgg13" and name == "fig9":
            seconds += {"16": 0.0, "32": 0.01, "64": 0.02}[values["cluster.nodes"]] * (values["planner"] == "megatron")
        if values["model"] == "vgg13" and name == "fig10" and values["planner"] == "megatron":
            seconds = 5.0
        if values.get("cluster.node_bandwidth_gb_s") == "6.25" and values["planner"] == "megatron":
            seconds = 1.2
        if values["planner"] == "summa" and values.get("cluster.nodes") in ("128", "256"):
            seconds = 1.2
        count = int(values.get("batch.micro_batches", 1))
        if values["planner"] == "data_parallel" and values["model"] not in ("vgg13", "gpt_24_1024"):
            found.append(record(values, status="infeasible", reason="a device's memory needs at least 107 GiB"))
            continue
        strategy = plan(a=(2, 16, 1, 1, 1, 1))
        metrics = {"step_time_s": seconds * (1 + count / 1000)}
        found.append(record(values, plan=strategy, metrics=metrics, predicted={"communication_s": seconds / 2}))
    return found


def table3() -> list[RunRecord]:
    found = []
    for point in sweep_points("table3"):
        values = point.values()
        best = "1" if values["model"] == "gpt_16_5b" else "2"
        seconds = (1.0 if values["mesh.pipeline"] == best else 2.0) * (0.63 if values["planner"] == "autoddl" else 1.0)
        found.append(record(values, metrics={"step_time_s": seconds}))
    return found


def fig4() -> list[RunRecord]:
    return [
        record(point.values(), source="measured", predicted={"communication_s": 1.0 + number},
               metrics={"step_time_s": 99.0, "collective_s": 10.0 + number})
        for number, point in enumerate(sweep_points("fig4"))
    ]  # fmt: skip


def table2() -> list[RunRecord]:
    metrics = {"alpha_s": 1e-5, "bandwidth_gb_s": 2.0, "weights": "plain", "r2": {"plain": 0.95, "relative": 0.9},
               "r2_large": {"plain": 0.97, "relative": 0.5}}  # fmt: skip
    return [record(point.values(), source="measured", metrics=metrics) for point in sweep_points("table2")]


def fig7() -> list[RunRecord]:
    return [record(point.values(), plan=plan(**dict.fromkeys(DENSE, (1, 4, 8)))) for point in sweep_points("fig7")]


def as_published() -> list[RunRecord]:
    return [*fig3(), *table2(), *fig4(), *fig7(), *fig8(), *simulated("fig9"), *simulated("fig10"), *table3()]
