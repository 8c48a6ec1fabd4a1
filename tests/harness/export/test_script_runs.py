"""Scripts that are exported, run by torchrun: they have the losses of engine=single."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engines.single.engine import Config, SingleEngine
from harness.config import registry
from harness.core.plan import Plan
from harness.export import torch_pipelining
from harness.export.planned import Planned
from harness.interfaces import Model, OptimizerSpec, Session, SessionSpec
from tests.harness.export.made import names, planned
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("commands")

ROOT = Path(__file__).parents[3]
COMMON = ("mesh.pipeline=2", "mesh.data=1", "batch.size=8", "batch.micro_batches=4", "steps=2", "warmup=1", "seed=3")
NET = """
from torch import nn

from harness import Classifier


def build(width: int = 8):
    layers = [nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers, nn.Linear(width, 10)), input_shape=(3, 8, 8), classes=10)
"""


def of_single(one: Planned) -> list[float]:
    """The losses of the same model, batches and seed on one device."""
    config = one.config
    model: Model = registry.build("model", config.model)
    data = registry.build("data", config.data, model, config.seed)
    plan = Plan.contiguous([len(one.profile.layers)], one.plan.micro_batches * one.plan.mesh.data)
    spec = SessionSpec(("cpu",), OptimizerSpec(**config.optimizer), config.precision.dtype, seed=config.seed)

    def train(session: Session) -> list[float]:
        return [session.step(data.batch(step, config.batch.size)).loss for step in range(3)]

    return run_session(SingleEngine(Config()), model, plan, spec, train)


def of_script(one: Planned, folder: Path) -> list[float]:
    """The losses that the script prints."""
    script = folder / "plan.py"
    script.write_text(torch_pipelining.text(one))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(one.plan.mesh.size), str(script)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]


def test_a_model_of_a_file_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    keys = ("engine=torch_pipelining", "engine.schedule=1f1b", "precision=fp64", *COMMON)
    one = planned(*keys, f"model={tmp_path / 'net.py'}:build", layers=names("net", blocks=2))
    assert of_script(one, tmp_path) == pytest.approx(of_single(one), rel=1e-8)


@pytest.mark.usefixtures("at_length")
def test_tied_weights_dropout_and_recomputation(tmp_path: Path) -> None:
    """The first and the last stage share the embedding; a recomputation draws the masks of its forward pass."""
    small = ("model=gpt", "model.layers=2", "model.hidden=16", "model.sequence=16", "model.dropout=0.1")
    keys = ("engine=gpipe", "engine.checkpoint=always", "precision=fp64", "optimizer.name=adamw", *COMMON, *small)
    one = planned(*keys, layers=names("gpt", blocks=2))
    assert of_script(one, tmp_path) == pytest.approx(of_single(one), rel=1e-8)
