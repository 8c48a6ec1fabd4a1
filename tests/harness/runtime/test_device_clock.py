"""Points in the work of a device, and when they were."""

from __future__ import annotations

import time

import pytest
import torch

from harness.runtime.device_clock import DeviceClock
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda

GPU = torch.device("cuda:1")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


def test_a_cpu_has_the_clock_of_the_host() -> None:
    clock = DeviceClock(torch.device("cpu"))
    before = time.perf_counter()
    point, end = clock.now(), clock.synchronize()
    assert before <= clock.seconds(point) <= end <= time.perf_counter()


def test_a_gpu_waits_for_nothing_but_the_ends_of_a_step(cuda: FakeCuda) -> None:
    clock = DeviceClock(GPU)
    start_s = clock.synchronize()
    points = []
    for number in range(4):
        cuda.time_s = float(number)
        points.append(clock.now())
    assert [clock.seconds(point) - start_s for point in points] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert clock.total_s([(points[0], points[1]), (points[1], points[3])]) == pytest.approx(3.0)
    assert [entry for entry in cuda.log if entry[0] != "mark"] == [("synchronize", GPU)]


def test_a_point_is_in_the_stream_that_is_current_or_in_another(cuda: FakeCuda) -> None:
    clock, other = DeviceClock(GPU), torch.cuda.Stream(GPU)
    with torch.cuda.stream(other):
        clock.now()
    clock.now()
    clock.now(other)
    assert [entry for entry in cuda.log if entry[0] == "mark"] == [
        ("mark", other), ("mark", cuda.current(GPU)), ("mark", other),
    ]  # fmt: skip
