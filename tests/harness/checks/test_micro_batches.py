"""The number of micro-batches by their size."""

from __future__ import annotations

import pytest

from harness.checks import micro_batches
from harness.cli.compose import compose
from harness.core.problem import LEAVE_OUT, CannotRun, Problem
from harness.host import devices
from harness.host.devices import DetectedDevices
from tests.problems import fixes, refused


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    here = DetectedDevices("cpu", "a CPU", 2, 16 * 10**9)
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": here)


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ("engine=gpipe batch.micro_batch_size=2", 8),
        ("engine=gpipe batch.micro_batch_size=4 batch.size=64", 16),
        ("engine=ddp batch.micro_batch_size=2", 4),  # two devices are two replicas
        ("engine=ddp batch.micro_batch_size=2 mesh.data=1", 8),
        ("engine=torch_pipelining batch.micro_batch_size=2 mesh.data=2 mesh.pipeline=1", 4),
        ("engine=sbp planner=autoddl batch.micro_batch_size=2", 8),  # the planner's own number is no one's wish
        ("engine=gpipe", 8),
    ],
)
def test_it_is_the_samples_of_each_replica_divided_by_the_size(keys: str, count: int) -> None:
    assert compose(keys.split()).batch.micro_batches == count


@pytest.mark.parametrize(
    ("keys", "said", "first"),
    [
        ("batch.micro_batch_size=3", "does not divide batch.size 16", "batch.micro_batch_size=4"),
        ("engine=ddp batch.micro_batch_size=16", "does not divide the 8 samples of each", "batch.micro_batch_size=8"),
        ("batch.micro_batch_size=2 batch.micro_batches=4", "is batch.micro_batches=4", "without batch.micro_batches"),
        ("batch.micro_batch_size=0", "must be at least 1", "batch.micro_batch_size=1"),
        ("engine=ddp batch.micro_batch_size=3 batch.size=15", "do not divide batch.size 15", "batch.size=12"),
        ("batch.micro_batch_size=x", "is not a whole number", None),
    ],
)  # fmt: skip
def test_a_size_that_cannot_be(keys: str, said: str, first: str | None) -> None:
    with pytest.raises(CannotRun) as caught:
        compose(keys.split())
    (problem,) = refused(caught)
    assert said in problem.message and (first is None or fixes(problem)[0] == first)


def test_fixes_that_set_the_number_take_the_size_away() -> None:
    config = compose(["batch.micro_batch_size=4"])
    problem = Problem(
        "batch.micro_batches", 4, "is no multiple of 3", ({"batch.micro_batches": 6}, {"mesh.pipeline": 2})
    )
    (found,) = micro_batches.in_given_keys([problem], config)
    assert found.fixes == ({"batch.micro_batches": 6, "batch.micro_batch_size": LEAVE_OUT}, {"mesh.pipeline": 2})
    config.batch.micro_batch_size = None
    assert micro_batches.in_given_keys([problem], config) == [problem]
