"""What only a worker can find out before a model is profiled: does it fit, is a stored profile of it?"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from harness.core.cluster import Device, Link
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import PROFILE
from harness.host.machine import Machine
from harness.measure import benchmark_machine
from harness.measure.count_model import count
from harness.worker import profile_tasks
from harness.worker.profile_tasks import SLACK, check_profile, check_size
from models.unet.config import Config
from models.unet.unet import UNet
from tests.problems import row


def test_a_model_that_does_not_fit_is_not_profiled() -> None:
    """U-Net (2, 16) has 4,519,160 parameters: 36 MB for weights and gradients in float32."""
    model = UNet(Config())
    state, saved = 4_519_160 * 8, count(model, 2, "float32").sum("saved_bytes", 0, 108)
    check_size(model, 2, "float32", None, round(SLACK * (state + saved)))
    with pytest.raises(CannotRun, match=r"needs 34.5 MiB to be profiled, for weights and gradients alone; 33"):
        check_size(model, 2, "float32", None, state - 2**20)
    with pytest.raises(CannotRun, match=r"model unet_2_16_128 +needs .* and the activations of 2 samples"):
        check_size(model, 2, "float32", None, round(SLACK * (state + saved)) - 2**20)


class Chosen(nn.Module):
    """How many samples the weights see depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, self.linear(x[rows]))


class Choosing(UNet):
    def layers(self) -> nn.Sequential:
        return nn.Sequential(OrderedDict(flat=nn.Flatten(), cut=nn.Linear(3 * 64 * 64, 64), chosen=Chosen()))


def test_a_model_that_cannot_be_counted_is_profiled_if_its_weights_fit() -> None:
    model = Choosing(Config(size=64))
    with pytest.raises(CannotRun, match=r"by the values of tensors what it computes \(in layer 2 \(chosen\)"):
        count(model, 2, "float32")
    check_size(model, 2, "float32", None, 10**8)
    with pytest.raises(CannotRun, match="for weights and gradients alone"):
        check_size(model, 2, "float32", None, 10**6)


@pytest.fixture(scope="module")
def counted() -> ModelProfile:
    return count(SMALL, 1, "float32")


SMALL = UNet(Config(convs=1, channels=4, size=64))


def test_a_profile_of_the_model_itself_is_taken(counted: ModelProfile) -> None:
    check_profile(SMALL, counted, "p.json")
    renamed = tuple(replace(skip, name="") for skip in counted.skips)
    check_profile(SMALL, replace(counted, skips=renamed), "p.json")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p: {"model": "unet_9"}, "is of unet_9, the model is unet_1_4_64"),
        (lambda p: {"layers": p.layers[:-1], "skips": ()}, "is of unet_1_4_64 with 64 layers, it has 65 now"),
        (lambda p: {"dtype": "float64"}, "bytes of parameters, it has "),
        (lambda p: {"skips": ()}, "has no skips, unet_1_4_64 has 5 ("),
        (lambda p: {"skips": p.skips[1:]}, "has 4 skips, unet_1_4_64 has 5 ("),
        (lambda p: {"skips": (*p.skips[1:], replace(p.skips[0], target=64))}, "has 5 skips, unet_1_4_64 has 5 ("),
    ],
    ids=["model", "layers", "parameters", "no skips", "a skip less", "another skip"],
)
def test_a_profile_of_another_model_is_refused(counted: ModelProfile, change: Any, what: str) -> None:
    with pytest.raises(CannotRun) as caught:
        check_profile(SMALL, replace(counted, **change(counted)), "p.json")
    (problem,) = caught.value.problems
    assert row(problem) == ("profile", "p.json", ["without profile"]) and what in problem.message


@pytest.mark.parametrize(("quick_s", "there"), [(1000.0, ["2.json", "4.json"]), (-1.0, [])])
def test_profiles_ahead_are_made_while_they_are_quick_and_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: ModelProfile, quick_s: float, there: list[str]
) -> None:
    """Micro-batches of 8 cannot be profiled here: they are left to the run that asks for them, which is refused."""
    monkeypatch.setattr(profile_tasks, "QUICK_S", quick_s)

    def make(samples: int) -> ModelProfile:
        if samples == 8:
            raise CannotRun([Problem("model", None, "needs too much")])
        return replace(counted, micro_batch=samples)

    cache = tmp_path / "cache"
    profile_tasks._make_profiles(tmp_path, make, "1", [f"{n}={cache}/{n}.json" for n in (2, 4, 8, 16)])
    assert ModelProfile.load(tmp_path / PROFILE).micro_batch == 1
    assert sorted(path.name for path in cache.glob("*")) == there
    with pytest.raises(CannotRun):
        profile_tasks._make_profiles(tmp_path, make, "8", [])


@pytest.mark.parametrize("tf32", [True, False])
def test_this_machine_is_measured_as_the_run_uses_it(
    tf32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    for place in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(place, "allow_tf32", not tf32)

    def measure(kind: str, say: object, processes: bool, known: Machine | None) -> Machine:
        seen.extend([torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32])
        return Machine(Device("a GPU"), Link())

    monkeypatch.setattr(benchmark_machine, "measure", measure)
    profile_tasks.measure_machine(
        tmp_path, OmegaConf.create({"precision": {"tf32": tf32, "cudnn_benchmark": False}}), "cuda"
    )
    assert seen == [tf32, tf32]
