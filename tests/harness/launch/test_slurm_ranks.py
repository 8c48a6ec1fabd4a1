"""Where ranks of srun find each other."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from harness.core.run_files import RENDEZVOUS
from harness.host import launched
from harness.launch import network, slurm_ranks
from harness.launch.slurm_ranks import NoRendezvous, Rendezvous


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Rank 1 of two, on this machine."""
    for name, value in (("PROCID", "1"), ("LOCALID", "1"), ("STEP_NUM_TASKS", "2"), ("STEP_ID", "7")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv(launched.SRUN_ADDRESS, "127.0.0.1")
    monkeypatch.setenv(network.GLOO, "lo")
    return monkeypatch


def test_the_network_of_an_address(rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert network.address("127.0.0.1") == "127.0.0.1"
    assert network.interface("127.0.0.1") == "lo"
    assert network.interface("192.0.2.1") is None
    rank.delenv(network.GLOO)
    rank.setenv("SLURM_PROCID", "0")
    Rendezvous(tmp_path, "x").store()
    place = json.loads((tmp_path / RENDEZVOUS).read_text())
    assert (place["key"], place["address"]) == ("x.7", "127.0.0.1")
    assert os.environ[network.GLOO] == "lo"


@pytest.mark.parametrize("old", ["old.7", "new.6"], ids=["an earlier run", "an earlier step of this run"])
def test_an_earlier_rendezvous_is_skipped(rank: pytest.MonkeyPatch, tmp_path: Path, old: str) -> None:
    place = {"key": old, "address": "127.0.0.1", "port": 1}
    (tmp_path / RENDEZVOUS).write_text(json.dumps(place))
    rank.setattr(slurm_ranks, "LATE_S", 0.2)
    with pytest.raises(NoRendezvous, match=r"rank 1 on .* found no rank 0 .* -> out= on a file system that all nodes"):
        Rendezvous(tmp_path, "new").store()
    rank.setattr(slurm_ranks, "LATE_S", 30.0)
    found = []
    late = threading.Thread(target=lambda: found.append(Rendezvous(tmp_path, "new").store()))
    late.start()
    host = slurm_ranks.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    (tmp_path / RENDEZVOUS).write_text(json.dumps(place | {"key": "new.7", "port": host.port}))
    late.join(30)
    host.set("here", "yes")
    assert found[0].get("here") == b"yes"


def test_another_number_of_ranks_than_planned(rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"SLURM_STEP_NUM_TASKS 2 +is not the number of ranks of the plan, 4"):
        slurm_ranks.run_in_step(4, lambda: None, "cpu", False, Rendezvous(tmp_path, "x"))
