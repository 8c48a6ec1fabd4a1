"""How long Slurm waits, against how long a run may take."""

import pytest

from slurm import client, kill_wait

SAID = """\
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 30 sec
"""


@pytest.mark.parametrize(("grace_s", "told"), [(29.0, False), (30.0, True), (120.0, True)])
def test_a_note_where_slurm_is_faster(monkeypatch: pytest.MonkeyPatch, grace_s: float, told: bool) -> None:
    monkeypatch.setattr(client, "ask", lambda command: SAID)
    note = kill_wait.note(grace_s)
    assert bool(note) == told
    if told:
        assert f"launch.grace_s={grace_s:g}, but Slurm kills a run 30 s" in note


def test_no_note_where_slurm_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ask", lambda command: "JobRequeue = 1\n")
    assert kill_wait.note(1e9) == ""
