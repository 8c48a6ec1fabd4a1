"""Each committed mutant applies to its file once, and the test named for it exists, in the full tier."""

import subprocess
import sys

import pytest

from tests.mutant_list import MUTANTS, Mutant
from tests.mutants import ROOT, TIERS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_applies_and_its_test_exists(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert (ROOT / mutant.test.partition("::")[0]).exists()


@pytest.mark.full
@pytest.mark.usefixtures("commands")
def test_each_has_a_test_in_the_full_tier() -> None:
    files = sorted({mutant.test.partition("::")[0] for mutant in MUTANTS})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *TIERS["full"], *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [mutant.name for mutant in MUTANTS if not any(map(mutant.names, listed))] == []
