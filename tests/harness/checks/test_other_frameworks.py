"""The names of other frameworks are no keys here, and the keys that they stand for exist."""

from itertools import chain

import pytest

from harness.checks.other_frameworks import ENGINES, ROWS, Row, engine, row
from harness.cli.compose import compose
from harness.config import registry
from harness.config.key_names import leaves
from harness.config.overrides import having

KEYS = set(leaves(compose([])))


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.names[0])
def test_a_name_is_no_key_and_has_one_meaning(one: Row) -> None:
    group, _, key = one.key.partition(".")
    assert one.key in KEYS or having(group, key)
    assert not KEYS & {*one.names}
    assert [other for other in ROWS if other is not one and {*other.names} & {*one.names}] == []


def test_engines_elsewhere_are_none_here() -> None:
    names = list(chain.from_iterable(ENGINES))
    assert len(set(names)) == len(names)
    assert {name for name in names if ("engine", name) in registry.schemas()} == set()
    assert engine("ZeRO-3") == engine("zero_3") == ({"engine": "deepspeed", "engine.zero": 3},)
    assert engine("gpipf") == ()


def test_a_name_counts_after_a_group_and_not_for_the_key_that_another_choice_has() -> None:
    groups = ["engine", "model"]
    assert row("engine.chunks", groups) is row("chunks", groups) is not None
    assert row("slurm.chunks", groups) is row("engine.zero", groups) is row("planner.balance", ["planner"]) is None
    assert row("zero_optimization.stage", groups) is row("zero", groups)
