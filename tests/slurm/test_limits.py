"""What Slurm allows, against what a sweep asks for."""

import pytest

from slurm import commands
from slurm.limits import Limits, limits
from slurm.settings import Settings

SAID = """\
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 30 sec
MaxArraySize            = 1001
"""


def test_what_slurm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ask", lambda command: SAID)
    assert limits() == Limits(1001, 30)
    monkeypatch.setattr(commands, "ask", lambda command: "JobRequeue = 1\n")
    assert limits() == Limits(None, None)


@pytest.mark.parametrize(("grace_s", "warned"), [(29.0, False), (30.0, True), (120.0, True)])
def test_a_note_where_slurm_is_faster(grace_s: float, warned: bool) -> None:
    note = Limits(1001, 30).note(grace_s)
    assert bool(note) == warned
    assert not warned or (f"launch.grace_s {grace_s:g} " in note and "-> launch.checkpoint_every=100" in note)
    assert Limits(1001, None).note(1e9) == ""


@pytest.mark.parametrize(
    ("indices", "time", "keys"),
    [
        ([0, 1000], "2", []),
        ([0, 1001], "2", ["index"]),
        ([0], "1", ["slurm.time"]),
        ([2000], "0:59", ["index", "slurm.time"]),
    ],
)
def test_what_cannot_be_an_array(indices: list[int], time: str, keys: list[str]) -> None:
    found = Limits(1001, 30).problems(indices, Settings(time=time), 30.0)
    assert [problem.key for problem in found] == keys
    assert all(problem.fixes or problem.hint for problem in found)
    assert Limits(None, None).problems([10**6], Settings(), 30.0) == []
