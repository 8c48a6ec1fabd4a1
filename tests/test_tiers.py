"""The fast tier has each value of each parameter; what starts commands is left to the full one."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiers

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest

@pytest.mark.parametrize("model", ["a", "b", "c"])
@pytest.mark.parametrize("stages", [1, 2])
def test_product(model, stages): pass

@pytest.mark.parametrize(("model", "stages"), [("a", 1), ("a", 2), ("b", 1)])
def test_examples(model, stages): pass

def test_starts(commands): pass

@pytest.mark.fast
@pytest.mark.parametrize("engine", ["x", "y"])
def test_stays(commands, engine): pass
"""


def values(**case: object) -> frozenset[tuple[str, ...]]:
    return frozenset((name, str(value)) for name, value in case.items())


def test_each_value_is_there_once() -> None:
    cases = [values(model=model, stages=stages) for model, stages in product("abc", (1, 2))]
    assert len(tiers.cover(cases)) == 3


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
        ("not full", [*(f"test_examples[{one}]" for one in ("a-1", "a-2", "b-1")), "test_stays[x]", "test_stays[y]"]),
        ("full", ["test_starts"]),
    ],
)  # fmt: skip
def test_a_collection_is_parted(tmp_path: Path, tier: str, there: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["--collect-only", "-p", "tests.conftest", "-m", tier, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    products = [name for name in found if name.startswith("test_product")]
    assert [name for name in found if name not in products] == there, done.stdout + done.stderr
    assert len(products) == 3
