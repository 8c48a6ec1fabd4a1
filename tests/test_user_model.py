"""A model in a file of the user's own, outside the checkout, through the front door: every engine and every mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import run
from harness.config import registry
from harness.core.record import RunRecord
from harness.core.run_files import CHECKPOINTS, METRICS, PROFILE, RECORD
from harness.sweep.points import expand
from harness.user_model import reference
from harness.user_model.load import load
from slurm.feasibility import examine
from slurm.settings import Settings
from tests import tiers
from tests.harness.user_model import nets
from tests.support import known_machine
from tests.support.faults import ENGINES
from tests.test_every_engine import FURTHER

pytestmark = pytest.mark.usefixtures("fork_server")

STEPS = 3
SETTINGS = ["batch.size=16", "warmup=1", f"steps={STEPS - 1}", "tracker=none", "cluster.devices=2", "seed=5"]
MICRO_BATCHES = 4
SOME = ("gpipe", "torch_pipelining")
"""A pipeline of threads, and one of processes."""
PLAN = ["mode=plan", "tracker=none", "costs=analytic", "cluster=p40x8", "cluster.devices=2"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with known_machine.known(tmp_path_factory):
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, whose name needs quotes, with net.py."""
    folder = tmp_path / "it's [mine], = yours"
    nets.write(folder, nets.WRAPPED)
    monkeypatch.chdir(folder)
    return folder


def record(folder: Path) -> RunRecord:
    return RunRecord.load(folder / RECORD)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / METRICS).read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(cache: None, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("expected")
    nets.write(folder, nets.WRAPPED)
    here = os.getcwd()
    os.chdir(folder)
    try:
        return trained("single", folder / "run")
    finally:
        os.chdir(here)


def trained(engine: str, folder: Path, *further: str) -> list[float]:
    overrides = (ENGINES | FURTHER)[engine]
    replicas = 2 if "mesh.data=2" in overrides else 1
    typed = ["model=net.py:build", f"engine={engine}", *overrides, *SETTINGS, *further]
    assert run.main([*typed, f"batch.micro_batches={MICRO_BATCHES // replicas}", f"out={folder}"], {}) == 0
    assert record(folder).status == "ok"
    return losses(folder)


@pytest.mark.parametrize("engine", tiers.split(sorted({*ENGINES, *FURTHER} - {"single"}), SOME))
def test_every_engine_trains_like_single(
    engine: str, expected: list[float], here: Path, tmp_path: Path, commands: None
) -> None:
    found = trained(engine, tmp_path / "run")
    assert len(found) == STEPS == len(set(found))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("engine", SOME)
def test_the_module_loads_what_a_pipeline_has_learned(engine: str, tmp_path: Path, commands: None) -> None:
    """By its own names; and a run that goes on from there has the losses of one that was not stopped."""
    nets.write(tmp_path, nets.MASKED)
    typed = [f"model={tmp_path}/net.py:build", f"engine={engine}", "mesh.pipeline=2", "batch.size=6", "precision=fp64"]
    typed += [
        "tracker=none",
        "cluster.devices=2",
        "batch.micro_batches=3",
        "warmup=1",
        "steps=3",
        f"out={tmp_path}/run",
    ]
    assert run.main([*typed, "launch.checkpoint_every=2"], {}) == 0
    found, folder = losses(tmp_path / "run"), tmp_path / "run" / CHECKPOINTS
    module = load(reference.parse(f"{tmp_path}/net.py:build"))().module.double()
    for path in folder.glob("*.pt"):
        module.load_state_dict(torch.load(path, weights_only=True)["session"]["model"])
    (tmp_path / "run" / RECORD).unlink()
    (folder / "step-4.pt").unlink()
    assert run.main([*typed, "launch.checkpoint_every=2"], {}) == 0
    assert losses(tmp_path / "run") == pytest.approx(found, rel=1e-12) and len(found) == 4


@pytest.mark.parametrize(
    "engine",
    ["ddp mesh.data=1", "ddp mesh.data=2", "delayed engine.stages=1", "periodic planner=contiguous mesh.pipeline=1"],
)
def test_what_passes_leave_in_modules_is_in_a_checkpoint(engine: str, tmp_path: Path, commands: None) -> None:
    """Numbers, lists and tensors in attributes, buffers that no state dict has or has a mean of, Python's generator."""
    nets.write(tmp_path, nets.STATEFUL)
    typed = [f"model={tmp_path}/net.py:build", "batch.size=8", "precision=fp64", "tracker=none", "cluster.devices=2"]
    typed += [f"engine={engine.split()[0]}", *engine.split()[1:], "batch.micro_batches=2", "warmup=1", "steps=3"]
    typed += ["launch.checkpoint_every=2", f"out={tmp_path}/run"]
    assert run.main(typed, {}) == 0
    found = losses(tmp_path / "run")
    (tmp_path / "run" / RECORD).unlink()
    (tmp_path / "run" / CHECKPOINTS / "step-4.pt").unlink()
    assert run.main(typed, {}) == 0
    assert losses(tmp_path / "run") == found and len(set(found)) == 4


def test_the_parent_does_not_import_torch(here: Path, commands: None) -> None:
    """Nor the user's file, where its source is enough."""
    code = "import sys, run; code = run.main(sys.argv[1:]); sys.exit('torch' if 'torch' in sys.modules else code)"
    environment = os.environ | {"PYTHONPATH": str(registry.ROOT)}
    for words in (["--help"], ["--cfg", "job"], PLAN):
        command = [sys.executable, "-c", code, *words, "model=net.py:build"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=here, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("mode", ["plan", "simulate", "profile", "tune"])
def test_other_modes(mode: str, here: Path, tmp_path: Path, commands: None) -> None:
    out = tmp_path / "run"
    assert run.main([*PLAN, f"mode={mode}", "engine=gpipe", "model=net.py:build", f"out={out}"], {}) == 0
    found = record(out)
    assert (found.status, found.config["model"]["name"]) == ("ok", "net.py:build")
    assert found.config["model"]["callable"] == f"{here}/net.py:build"


def test_a_sweep_of_several_from_another_folder(
    here: Path,
    tmp_path: Path,
    commands: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its points hold whole paths: started again elsewhere, they are done before."""
    nets.write(here, nets.SMALL, "other, too.py")
    models = "net.py:build,other, too.py:build,mlp"
    typed = ["-m", *PLAN[1:], "mode=plan", f"out={tmp_path / 'sweep'}"]
    assert run.main([*typed, f"model={models}"], {}) == 0
    names = {
        record(path).config["model"]["name"]: record(path).status
        for path in (tmp_path / "sweep").iterdir()
        if path.is_dir()
    }
    assert names == {"net.py:build": "ok", "other, too.py:build": "infeasible", "mlp": "ok"}
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in (tmp_path / "sweep").iterdir()}
    capsys.readouterr()
    assert run.main([*typed, f"model={here}/net.py:build"], {}) == 0
    assert "was changed" not in capsys.readouterr().out
    nets.write(here, nets.WRAPPED.replace("Tanh", "ReLU"))
    assert run.main([*typed, f"model={here}/net.py:build"], {}) == 0
    assert "was run before net.py:build was changed, and is kept" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == before


def test_a_submission_finds_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = expand(reference.typed(["model=net.py:build", "engine=gpipe,ddp", "tracker=none"]))
    monkeypatch.chdir("/")
    assert [one.refused for one in examine(points, Settings())] == [None, None]


def test_an_edit_makes_a_new_profile_and_no_run_resumes_with_it(
    here: Path, tmp_path: Path, commands: None, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    first = trained("single", out)
    parameters = [layer["param_bytes"] for layer in json.loads((out / PROFILE).read_text())["layers"]]
    nets.write(here, nets.WRAPPED.replace("width: int = 8", "width: int = 6 + 3"))
    again = ["model=net.py:build", "engine=single", *SETTINGS, "batch.micro_batches=4", "steps=4"]
    capfd.readouterr()
    assert run.main([*again, f"out={out}"], {}) == 2
    assert "model.source" in capfd.readouterr().err
    assert trained("single", tmp_path / "other") != first
    changed = [layer["param_bytes"] for layer in json.loads((tmp_path / "other" / PROFILE).read_text())["layers"]]
    assert parameters != changed
    nets.write(here, nets.WRAPPED)
    os.chdir(tmp_path)
    again[0] = f"model={here}/net.py:build"
    assert run.main([*again, f"out={out}"], {}) == 0, "it resumes for more steps, from another working directory"
    assert losses(out)[:STEPS] == first and len(losses(out)) == 5


def test_a_model_that_cannot_be_split_trains_whole(
    here: Path, tmp_path: Path, commands: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one stage, with a note of the line that prevents more; a pipeline is refused by that line at once."""
    nets.write(here, nets.BRANCH)
    place = f"net.py:{nets.BRANCH.splitlines().index('        if x.sum() > 0:') + 1}, `if x.sum() > 0:`: it reads"
    whole = trained("single", tmp_path / "single")
    assert f"is one layer: {place}" in " ".join(capfd.readouterr().out.split())
    assert trained("ddp", tmp_path / "ddp") == pytest.approx(whole), "weights without a gradient are no error"
    for mode in ("run", "plan"):
        capfd.readouterr()
        typed = ["model=net.py:build", "engine=gpipe", f"mode={mode}", *SETTINGS, "batch.micro_batches=4"]
        assert run.main([*typed, f"out={tmp_path / mode}"], {}) == 2
        assert f"cannot be split into stages: {place}" in " ".join(capfd.readouterr().err.split())


CHANGING = """
import torch
from torch import nn

from harness import Classifier


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.passes = nn.Linear(4, 8), nn.Linear(8, 3), []

    def forward(self, x):
        self.passes.append(len(x))
        return self.second(torch.tanh(self.first(x)) * len(self.passes))


def build():
    return Classifier(Net(), (4,), 3)
"""
"""A module that computes with what its passes leave in a list: its layers would not."""


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_layers_that_compute_something_else_do_not_train(
    costs: str, here: Path, tmp_path: Path, commands: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the layers' times are measured, which compares them, or computed."""
    nets.write(here, CHANGING)
    keys = ["model=net.py:build", "engine=single", f"costs={costs}", *SETTINGS, "batch.micro_batches=2"]
    assert run.main([*keys, f"out={tmp_path / costs}"], {}) == 2
    assert "does not compute the same in layers: layer" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "net.py:build   does not exist"),
        ("def make():\n    return 3\n", "has no build, it has make"),
        ("raise ValueError('it is mine')\n", "ValueError: it is mine"),
        ("def build():\n    raise ValueError('it is mine')\n", 'net.py", line 2, in build'),
        ("def build(width):\n    return 3\n", "required parameter width without annotation"),
        ("def build(width: int):\n    return 3\n", "model.width   needs a value"),
        ("build = 3\n", "is an int"),
        ("def build():\n    pass\n", "returns None, it must return a model"),
        (nets.WRAPPED.replace("(4, width)", "(5, width)"), "mat1 and mat2 shapes cannot be multiplied"),
        (nets.WRAPPED.replace("classes=3", "classes=4"), "must give (8, 4)"),
        (nets.SMALL, "model.task=classification model.input=[3,32,32] model.classes=10"),
    ],
)
def test_what_is_wrong_is_one_message(
    text: str | None, message: str, here: Path, tmp_path: Path, commands: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "net.py").unlink() if text is None else nets.write(here, text)
    assert run.main([*PLAN, "batch.micro_batches=2", "model=net.py:build", f"out={tmp_path / 'run'}"], {}) == 2
    said = capfd.readouterr()
    assert message in said.err
    assert "harness/" not in said.err, "the user's traceback alone"
    assert said.err.count("cannot run:") == 1
