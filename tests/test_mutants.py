"""Each committed mutant applies to its file once, and the test named for it exists."""

import pytest

from tests.mutant_list import MUTANTS, Mutant
from tests.mutants import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_applies_and_its_test_exists(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert (ROOT / mutant.test.partition("::")[0]).exists()
