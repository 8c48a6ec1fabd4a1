"""engine.schedule=all: every family planned and simulated, the best one first, in a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from engines.pipeline.engine import PLACED
from harness.checks import engine_support
from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.planning.alternatives import Alternative, compared
from harness.report import alternatives_report
from harness.schedule.families import FAMILIES

PROFILE = ModelProfile(
    tuple(LayerProfile(f"layer{k}", 0.01, 0.02, 100_000, 20_000, saved_bytes=50_000) for k in range(8)), input_bytes=100
)
TYPED = ["mode=plan", "engine=pipeline", "engine.schedule=all", "model=mlp", "batch.size=8", "batch.micro_batches=8",
         "mesh.pipeline=2", "mesh.data=1", "cluster=flat", "cluster.devices=2",
         "cluster.bandwidth_gb_s=10"]  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[Alternative]:
    return made()


def made(memory_bytes: int = 0, *more: str) -> list[Alternative]:
    config = compose([*TYPED, *more])
    cluster = Cluster(devices_per_node=2, device=Device("D", memory_bytes), intra=Link(1e-5, 1e-10))
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    return compared(config, engine, planner, PROFILE, cluster)


@pytest.mark.usefixtures("computation")
def test_all_families_and_the_search_are_there_the_fastest_first(found: list[Alternative]) -> None:
    assert {one.name for one in found} == {*FAMILIES, *(f"search ({where})" for where in PLACED)}
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    by_name = {one.name: one for one in found}
    assert by_name["zb_h1"].step_s < by_name["1f1b"].step_s
    for where in PLACED:
        best_s = min(by_name[name].step_s for name, family in FAMILIES.items() if family.places == where)
        assert by_name[f"search ({where})"].step_s <= best_s + 1e-9


@pytest.mark.usefixtures("computation")
def test_a_search_takes_the_best_of_all_places(found: list[Alternative]) -> None:
    """In any mode: it is no comparison but a choice."""
    searched = made(0, "engine.schedule=search")
    assert {one.name for one in searched} == {f"search ({where})" for where in PLACED}
    assert searched[0].step_s <= found[0].step_s + 1e-9, "nor is any published family faster"
    config = compose([*TYPED[1:], "mode=run", "engine.schedule=search"])
    cluster = Cluster(devices_per_node=2, intra=Link(1e-5, 1e-10))
    problems = engine_support.early(config, registry.build("engine", config.engine), cluster)
    assert not [one for one in problems if one.key == "engine.schedule"]
    assert made(0, "engine.schedule=search", "engine.placement=v") == []


@pytest.mark.usefixtures("computation")
def test_what_does_not_fit_comes_last(found: list[Alternative]) -> None:
    needed = sorted(one.peak_bytes for one in found)
    less = made(needed[len(needed) // 2])
    fitting = [not one.refused for one in less]
    assert fitting == sorted(fitting, reverse=True)
    assert any(fitting) and not all(fitting)


def test_what_a_family_cannot_do_is_said() -> None:
    rows = {one.name: one for one in made(0, "batch.micro_batches=1")}
    assert "is less than the 4 stages" in rows["dualpipev"].refused
    assert rows["1f1b"].draft


def test_table_and_picture(found: list[Alternative], tmp_path: Path) -> None:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(alternatives_report.table(found))
    lines = captured.get().splitlines()
    assert lines[0].split() == ["schedule", "step", "time", "bubble", "peak", "memory", "kept", "activations", "sent"]
    assert [line.split("  ")[0] for line in lines[1:]] == [one.name for one in found]
    alternatives_report.draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_needs_one_of_them() -> None:
    config = compose([*TYPED[1:], "mode=run"])
    cluster = Cluster(devices_per_node=2, intra=Link(1e-5, 1e-10))
    problems = engine_support.early(config, registry.build("engine", config.engine), cluster)
    (found,) = [one for one in problems if one.key == "engine.schedule"]
    assert found.fixes == ({"engine.schedule": "gpipe"}, {"mode": "plan"})
