"""How long tests take, as measured: tests/durations.tsv, of which tests/tiers.py makes the tiers.

    python -m tests.durations       runs the fast and the full tier and the short soak, and writes the file again

A line has the seconds of a case of a test, the mean of all its cases, and those of all together: CPU time of the test
and of the processes that it has started, or a third of its wall time if that is more, since three tests run at a time.
Cases that share what is made for their module share the time in which it is made.
Tests of less than `CASE_S` and `TEST_S` are left out: they belong to the fast tier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
FILE = HERE / "durations.tsv"
FOLDER = "REGATTA_TEST_DURATIONS"
"""The environment variable that says where a measuring run leaves what its tests took."""
CASE_S, TEST_S = 0.3, 20.0
AT_A_TIME = 3


class Duration(NamedTuple):
    """Seconds of a case, and of all cases."""

    case_s: float
    test_s: float


class Measured(NamedTuple):
    """A case: its test, its seconds, those of them in which what it uses was made, and the module that shares that."""

    test: str
    seconds: float
    setup_s: float = 0.0
    module: str = ""


_SETUP = pytest.StashKey[float]()


def known() -> dict[str, Duration]:
    """Returns what each test of the file takes, by `name`."""
    lines = (line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines())
    return {test: Duration(float(case_s), float(test_s)) for case_s, test_s, test in lines}


def name(node_id: str) -> str:
    """Names the test of a case: its file and its function, without its parameters and its group of processes."""
    return node_id.partition("[")[0].partition("@")[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Measures what is made for a test; `python -m tests.durations` loads this module as a plugin."""
    begin = _now()
    try:
        return (yield)
    finally:
        item.stash[_SETUP] = _between(begin, _now())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Adds a line to the file of this process."""
    begin = _now()
    try:
        return (yield)
    finally:
        module = "@" in item.nodeid.rpartition("]")[2] and item.nodeid.partition("::")[0]
        line = Measured(name(item.nodeid), _between(begin, _now()), item.stash.get(_SETUP, 0.0), module or "")
        with (Path(os.environ[FOLDER]) / str(os.getpid())).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _now() -> tuple[float, float, float]:
    """CPU seconds of this process and of its children that have ended, and the time."""
    times = os.times()
    return times.user + times.system, times.children_user + times.children_system, time.perf_counter()


def _between(begin: tuple[float, float, float], end: tuple[float, float, float]) -> float:
    own, children, wall_s = (later - earlier for earlier, later in zip(begin, end, strict=True))
    # what has ended in a test may have worked for many before it
    return max(own + min(children, AT_A_TIME * wall_s), wall_s / AT_A_TIME)


def main(arguments: Sequence[str]) -> int:
    """Runs all the tests, and writes the file if they pass. Takes no arguments but --help."""
    if arguments:
        print(__doc__)
        return 0 if arguments == ["--help"] else 2
    chosen = ["-m", "not soak or short_soak", "-n", str(AT_A_TIME), "--dist", "loadgroup", "-p", "tests.durations"]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {FOLDER: folder, "OMP_NUM_THREADS": "1", "CI": "true"}  # none may be skipped
        command = [sys.executable, "-m", "pytest", "-q", *chosen]
        code = subprocess.run(command, cwd=HERE.parent, env=environment, check=False).returncode
        if not code:
            lines = [
                Measured(*json.loads(line)) for file in Path(folder).iterdir() for line in file.read_text().splitlines()
            ]
            FILE.write_text(table(lines), encoding="utf-8")
    return code


def table(measured: Sequence[Measured]) -> str:
    """Returns the text of the file."""
    setups, seconds_of = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for one in measured:
        setups[one.module].append(one.setup_s)
    for one in measured:
        own_s = one.seconds - one.setup_s + fmean(setups[one.module]) if one.module else one.seconds
        seconds_of[one.test].append(own_s)
    taken = {test: Duration(round(fmean(each), 1), round(sum(each), 1)) for test, each in sorted(seconds_of.items())}
    slow = {test: one for test, one in taken.items() if one.case_s >= CASE_S or one.test_s >= TEST_S}
    return "".join(f"{one.case_s}\t{one.test_s}\t{test}\n" for test, one in slow.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
