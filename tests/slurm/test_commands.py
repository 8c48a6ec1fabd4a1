"""Slurm's programs that fail: what a user can do then."""

from __future__ import annotations

import pytest

from harness.core.problem import CannotRun
from slurm import commands
from tests.problems import refused


@pytest.mark.parametrize(
    ("said", "elsewhere"),
    [
        ("sinfo: fatal: Could not establish a configuration source", True),
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", True),
        ("sinfo: error: Munge encode failed: Failed to access munge.socket.2: No such file or directory", True),
        ("sinfo: error: get_addr_info: getaddrinfo() failed: Name or service not known: Invalid argument", True),
        ("sinfo: fatal: Unable to process configuration file", True),
        ("sinfo: error: Invalid node state specified: nothing", False),
    ],
)
def test_a_program_that_fails(said: str, elsewhere: bool) -> None:
    with pytest.raises(CannotRun) as caught:
        commands.ask(["sh", "-c", f"echo '{said}' >&2; exit 1"])
    (problem,) = refused(caught)
    assert problem.key == "sh" and ("login node" in problem.hint) == elsewhere
    assert (said in problem.message) == (not elsewhere)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(CannotRun) as caught:
        commands.ask(["no_such_program"])
    assert [problem.hint for problem in refused(caught)] == [commands.HERE]
