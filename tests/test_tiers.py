"""The fast tier has each value of each parameter; what starts commands is left to the full one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiers

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest
from tests import durations, tiers

LONG = durations.Duration(1.1, 1.1)

@pytest.mark.parametrize("model", ["a", "b", "c"])
@pytest.mark.parametrize("stages", [1, 2])
def test_product(model, stages): pass

@pytest.mark.parametrize(("model", "stages"), [("a", 1), ("a", 2), ("b", 1)])
def test_examples(model, stages): pass

@pytest.mark.parametrize("model", ["a", "b", "c"])
@pytest.mark.parametrize("stages", [1, 2])
def test_starts(commands, model, stages): pass

@pytest.mark.fast
@pytest.mark.parametrize("engine", ["x", "y"])
def test_stays(commands, engine): pass

def test_repeats(at_length): pass

@pytest.mark.parametrize("engine", ["x", "y", pytest.param("z", marks=pytest.mark.soak)])
def test_takes_long(engine): pass
tiers.DURATIONS["test_it.py::test_takes_long"] = LONG

def test_takes_seconds(): pass
tiers.DURATIONS["test_it.py::test_takes_seconds"] = durations.Duration(0.5, 0.5)

@pytest.mark.parametrize("model", tiers.later(["a", "b"], ["b"]))
def test_takes_long_and_has_a_later_case(model): pass
tiers.DURATIONS["test_it.py::test_takes_long_and_has_a_later_case"] = LONG

@pytest.mark.parametrize("number", range(3))
def test_takes_long_with_all_cases(number): pass
tiers.DURATIONS["test_it.py::test_takes_long_with_all_cases"] = durations.Duration(0.1, 21.0)

@pytest.mark.full
def test_belongs_to_the_full_tier(): pass
tiers.DURATIONS["test_it.py::test_belongs_to_the_full_tier"] = LONG

@pytest.mark.fast
@pytest.mark.parametrize("model", ["a", "b", "c"])
@pytest.mark.parametrize("stages", [1, 2])
def test_belongs_to_the_fast_tier(model, stages): pass
tiers.DURATIONS["test_it.py::test_belongs_to_the_fast_tier"] = LONG

@pytest.mark.parametrize("model", tiers.short_soak(["a", "b", "large"], ["large"]))
@pytest.mark.parametrize("stages", [1, 2])
def test_some(commands, model, stages): pass
"""
SHARING = """
import pytest

@pytest.fixture(scope="module")
def made(): pass

@pytest.fixture(scope="module")
def made_of_it(made): pass

@pytest.fixture
def alone(): pass

def test_one(made): pass
def test_other(made_of_it, alone): pass
def test_cluster(slurm, made): pass
def test_by_itself(alone, tmp_path, fork_server): pass
"""
GROUPS = """
def pytest_collection_finish(session):
    for item in session.items:
        print("GROUP", item.name, *(name for mark in item.iter_markers("xdist_group") for name in mark.args))
"""


def values(**case: object) -> frozenset[tuple[str, ...]]:
    return frozenset((name, str(value)) for name, value in case.items())


def test_each_value_is_there_once() -> None:
    cases = [values(model=model, stages=stages) for model, stages in product("abc", (1, 2))]
    assert len(tiers.cover(cases)) == 3


def test_values_are_spread() -> None:
    cases = [values(model=model, zero=zero) for model, zero in product("abcdefgh", (0, 1, 2, 3))]
    chosen = [cases[number] for number in tiers.cover(cases)]
    assert len(chosen) == 8 and all(sum(("zero", str(zero)) in case for case in chosen) == 2 for zero in range(4))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_no_value_is_left_out(sizes: list[int]) -> None:
    cases = [values(**{f"p{n}": value for n, value in enumerate(one)}) for one in product(*map(range, sizes))]
    chosen = tiers.cover(cases)
    assert frozenset().union(*(cases[number] for number in chosen)) == frozenset().union(*cases)
    assert len(chosen) == len(set(chosen)) <= (sum(sizes) if len(sizes) > 1 else len(cases))


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("tier", "there"),
    [
        (
            "not full",
            {"test_product": 3, "test_examples": 3, "test_stays": 2, "test_belongs_to_the_fast_tier": 3},
        ),
        (
            "full and not soak",
            {
                "test_product": 3,
                "test_starts": 3,
                "test_takes_seconds": 1,
                "test_belongs_to_the_full_tier": 1,
                "test_belongs_to_the_fast_tier": 3,
                "test_some": 2,
            },
        ),
        (
            "soak",
            {
                "test_starts": 3,
                "test_repeats": 1,
                "test_takes_long": 3,
                "test_takes_long_and_has_a_later_case": 2,
                "test_takes_long_with_all_cases": 3,
                "test_some": 4,
            },
        ),
        (
            "short_soak",
            {
                "test_takes_long": 2,
                "test_takes_long_and_has_a_later_case": 2,
                "test_takes_long_with_all_cases": 3,
                "test_some": 2,
            },
        ),
    ],
)
def test_a_collection_is_parted(tmp_path: Path, tier: str, there: dict[str, int]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    printed = collected(tmp_path, "-m", tier)
    found = Counter(line.partition("::")[2].partition("[")[0] for line in printed if "::" in line)
    assert found == there, printed


@pytest.mark.usefixtures("commands")
def test_what_is_made_for_a_module_is_made_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SHARING)
    (tmp_path / "conftest.py").write_text(f"{GROUPS}\nimport pytest\n@pytest.fixture\ndef slurm(): pass\n")
    groups = [line.split()[1:] for line in collected(tmp_path) if line.startswith("GROUP")]
    assert groups == [
        ["test_one", "test_it.py"],
        ["test_other", "test_it.py"],
        ["test_cluster", "slurm"],
        ["test_by_itself"],
    ]


def collected(folder: Path, *arguments: str) -> list[str]:
    """The lines that pytest prints of the tests in a folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    command += ["--collect-only", "-p", "tests.conftest", *arguments, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.xdist_group("its own")
def test_the_groups_reach_the_one_who_shares_the_tests_out(request: pytest.FixtureRequest) -> None:
    """Releases of pytest and xdist that do not go together lose them without a word: pytest 9.2 with xdist 3.8."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@its own")
