"""The keys `slurm.*`: typed, checked, all mistakes at once."""

import pytest

from harness.core.problem import CannotRun
from slurm.settings import Settings, minutes, read, split
from tests.problems import refused, rows


def test_read() -> None:
    assert split(["+sweeps=smoke", "slurm.nodes=2", "steps=3"]) == (["+sweeps=smoke", "steps=3"], ["slurm.nodes=2"])
    assert read([]) == Settings()
    typed = ["slurm.nodes=2", "slurm.time=1-12:00:00", "slurm.mem=4G", "slurm.partition=gpu"]
    assert read(typed) == Settings(nodes=2, time="1-12:00:00", mem="4G", partition="gpu")
    assert read(["slurm.mem=8G"], Settings(nodes=2, mem="4G")) == Settings(nodes=2, mem="8G")
    assert Settings.from_json(Settings(nodes=2).to_json()) == Settings(nodes=2)


def test_everything_that_is_wrong_at_once() -> None:
    with pytest.raises(CannotRun) as caught:
        read(["slurm.node=2", "slurm.tasks=many", "slurm.gpus=-1", "slurm.time=soon", "slurm.mem=big"])
    assert rows(refused(caught)) == [
        ("slurm.node", None, ["slurm.nodes=2 without slurm.node"]),
        ("slurm.tasks", "many", ["slurm.tasks=null"]),
        ("slurm.gpus", -1, ["slurm.gpus=0"]),
        ("slurm.time", "soon", ["slurm.time=1:00:00"]),
        ("slurm.mem", "big", ["slurm.mem=4G"]),
    ]


@pytest.mark.parametrize("name", ["", "--wrap=x", "a\nb"])
def test_names_are_names(name: str) -> None:
    with pytest.raises(CannotRun, match="is no name"):
        read([], Settings(account=name))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90:00", 90), ("1:30:00", 90), ("1-0", 1440), ("1-1:30", 1530), ("0:30", 0.5), ("UNLIMITED", None)],
)
def test_minutes(text: str, expected: float | None) -> None:
    assert minutes(text) == expected
