"""A run is not disturbed by a second command on its folder: what that is, and when it comes, does not matter."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.harness.run.two_writers import Pair, agree, check, random_pairs
from tests.support import known_machine
from tests.support.machines import MACHINE


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with known_machine.known(tmp_path_factory, MACHINE):
        yield


@pytest.mark.usefixtures("commands", "fork_server")
def test_second_commands_while_a_run_trains(tmp_path: Path) -> None:
    seconds = ("overwrite", -1), ("same keys", 0), ("plan", 1), ("sweep", 30), ("other keys", 60)
    assert check(Pair("single", seconds), tmp_path / "run")


@pytest.mark.usefixtures("commands", "fork_server", "at_length")
def test_two_runs_that_second_commands_do_not_disturb(tmp_path: Path) -> None:
    """Each kind of second command and of moment once, and two runs have the same losses."""
    one = Pair(
        "single", (("overwrite", -1), ("same keys", 0), ("plan", 1), ("sweep", 30), ("race", 60), ("other keys", 120))
    )
    other = Pair("single", (("more steps", 1), ("fewer steps", 60)))
    assert agree([check(one, tmp_path / "one"), check(other, tmp_path / "other")])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [28])
def test_random_pairs(tmp_path: Path, seed: int) -> None:
    found = defaultdict(list)
    for number, pair in enumerate(random_pairs(20, seed)):
        print(number, pair, flush=True)
        found[pair.first].append(check(pair, tmp_path / str(number)))
    assert all(map(agree, found.values()))
