"""Layers are timed while other processes compute, as many as the run has further devices."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from harness.checks import mesh
from harness.cli.compose import compose
from harness.host import devices
from harness.measure.companions import companions
from harness.measure.profile_model import measure
from tests.support import processes
from tests.support.nets import Net

pytestmark = pytest.mark.usefixtures("ranks")


class Counter:
    """A number that forks count up together."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096)

    def __call__(self) -> None:
        place = 8 * (os.getpid() % 500)
        self.memory[place : place + 8] = struct.pack("q", struct.unpack("q", self.memory[place : place + 8])[0] + 1)
        time.sleep(0.001)

    @property
    def processes(self) -> int:
        return sum(map(bool, struct.unpack("512q", self.memory[:])))

    @property
    def total(self) -> int:
        return sum(struct.unpack("512q", self.memory[:]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_each_has_worked_before_and_goes_on(count: int) -> None:
    counter, before = Counter(), processes.children()
    with companions(count, counter):
        assert counter.processes == count == len(processes.children() - before)
        seen, deadline = counter.total, time.monotonic() + 30
        while count and counter.total < seen + 10:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert processes.children() == before


@pytest.mark.parametrize("work", [lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_one_that_fails_holds_nothing_up(work: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> None:
    before = processes.children()
    with companions(1, work):
        pass
    assert processes.children() == before and capfd.readouterr() == ("", "")


def test_none_is_left_by_an_error() -> None:
    before = processes.children()
    with pytest.raises(ValueError, match="here"), companions(2, Counter()):
        raise ValueError("here")
    assert processes.children() == before


def test_a_profile_says_how_many_computed() -> None:
    """The companion runs the layers forward and backward, with numbers of its own."""
    net = Net(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (4,))
    alone, next_to = (measure(net, 2, "float32", "cpu", repeats=1, at_once=count) for count in (1, 2))
    assert (alone.at_once, next_to.at_once) == (1, 2)
    assert [one.flops for one in alone.layers] == [one.flops for one in next_to.layers]
    assert type(next_to).from_json(next_to.to_json()) == next_to
    torch.ones(2, requires_grad=True).sum().backward()  # this process goes on


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        ("engine=gpipe cluster.devices=2", 2),
        ("engine=gpipe cluster.devices=4", 3),
        ("engine=gpipe cluster.devices=4 mesh.pipeline=2", 2),
        ("engine=single cluster.devices=2", 1),
        ("engine=ddp cluster.devices=2 mesh.data=1", 1),
        ("engine=gpipe cluster.devices=2 mode=profile", 1),
        ("engine=gpipe cluster=p40x8", 1),
    ],
)
def test_as_many_compute_as_the_run_has_devices_and_the_machine_cores(
    typed: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 3)
    local = [] if "cluster=" in typed else ["cluster.device=cpu"]
    assert mesh.at_once(compose(["model=mlp", *typed.split(), *local])) == count
