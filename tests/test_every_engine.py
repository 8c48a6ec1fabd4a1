"""One real run of each engine through the front door, in the fast tier, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import run
from harness.config import registry
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, RECORD
from tests.support import known_machine
from tests.support.faults import ENGINES

STEPS = 3
SETTINGS = ["model=mlp", "batch.size=16", "warmup=1", f"steps={STEPS - 1}", "tracker=none", "cluster.devices=2"]
FURTHER = {
    "torchgpipe": ("mesh.pipeline=2",),
    "periodic": ("mesh.pipeline=2", "planner=contiguous", "engine.update_every=4"),
    "delayed": ("engine.stages=2", "engine.versions=flush"),
}
MICRO_BATCHES = 4


@pytest.fixture(scope="module", autouse=True)
def cache(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own: the model is profiled once for each size of a micro-batch, the machine is known."""
    with known_machine.known(tmp_path_factory):
        yield


def losses(engine: str, folder: Path) -> list[float]:
    overrides = (ENGINES | FURTHER)[engine]
    replicas = 2 if "mesh.data=2" in overrides else 1
    typed = [f"engine={engine}", *overrides, *SETTINGS, f"batch.micro_batches={MICRO_BATCHES // replicas}"]
    assert run.main([*typed, f"out={folder}"], {}) == 0
    assert RunRecord.load(folder / RECORD).status == "ok"
    return [json.loads(line)["loss"] for line in (folder / METRICS).read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(cache: None, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses("single", tmp_path_factory.mktemp("single") / "run")


def test_none_is_left_out() -> None:
    assert ENGINES.keys() | FURTHER.keys() == {plugin.name for plugin in registry.scan() if plugin.group == "engine"}


@pytest.mark.fast
@pytest.mark.parametrize("engine", sorted({*ENGINES, *FURTHER} - {"single"}))
def test_it_trains_like_single(engine: str, expected: list[float], tmp_path: Path, commands: None) -> None:
    found = losses(engine, tmp_path / "run")
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
    by_mpi = RunRecord.load(tmp_path / "run" / RECORD).manifest.get("mpi")
    assert bool(by_mpi) is (engine == "myelin") and not (by_mpi or {}).get("through_the_host")
