"""The two tiers of the tests: `make test` runs the fast one, `make test-full` both.

Left to the full tier, by the marker `full`, are

* tests that use a fixture of `SLOW`: it starts commands, ranks, a cluster, a browser or kernels of
  notebooks, or computes for seconds;
* tests that were measured to take 0.3 s a case or more, or twenty with all their cases (tests/durations.py);
* of a test with several `parametrize` the cases that repeat what another one has:

      model    a      b      c
      stages   1  2   1  2   1  2        full: all six
               x         x   x           fast: each model and each number of stages at least once

A test marked `fast` stays in the fast tier whatever it uses, with a covering set of its cases.

Of a slow test, one with a fixture of `SLOW`, the full tier has that covering set, too: `make soak` runs the others, and
those that repeat at length what another one has. Single cases of a test are left to it by `split`. Continuous
integration has a short soak, by the marker `short_soak`: tests that were measured to take more than 0.6 s a case, or
twenty with all of them, unless they are marked `full` where they are written; single cases that `short_soak` names; and
tests on the emulated cluster. Cases that must notice a fault of tests/mutant_list.py are in the full tier.

Several processes run tests at a time. Those of a module that share its fixtures run in one of them, by the
marker `xdist_group`: these are made once. So do all that use the emulated cluster.

A property test has at most ten examples in the fast tier: `@settings(max_examples=examples(60))`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import durations
from tests.mutant_list import MUTANTS

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

SLOW = frozenset({"commands", "ranks", "slurm", "browser", "kernels", "computation"})
"""Fixtures whose tests are too slow for the fast tier: see their docstrings."""
AT_LENGTH = "at_length"
"""The fixture of those that are left to soak."""
DURATIONS = durations.known()
LONG_S = durations.Duration(0.6, durations.TEST_S)
"""What is too slow for the full tier, which takes twelve minutes on two cores."""
FAST = "fast"
"""The profile of Hypothesis for the fast tier."""
Value = tuple[str, ...]
"""The arguments of a `parametrize`, and what one case has for them."""


def examples(count: int) -> int:
    """Returns how many examples a property test has in this tier; `count` in the full one."""
    fast = hypothesis.settings.get_current_profile_name() == FAST
    return min(count, hypothesis.settings.default.max_examples) if fast else count


def split(values: Iterable[Any], full: Container[Any]) -> list[ParameterSet]:
    """Returns the cases of a `parametrize` of which the full tier has those in `full`, and soak the others."""
    return [pytest.param(*_each(value), marks=[] if value in full else [pytest.mark.soak]) for value in values]


def later(values: Iterable[Any], full: Container[Any]) -> list[ParameterSet]:
    """Returns the cases of a `parametrize` of which the fast tier has none of those in `full`."""
    return [pytest.param(*_each(value), marks=[pytest.mark.full] if value in full else []) for value in values]


def short_soak(values: Iterable[Any], soak: Container[Any]) -> list[ParameterSet]:
    """Returns the cases of a `parametrize` of which those in `soak` take seconds each: they are left to soak, and
    continuous integration has them in its short one."""
    marks = [pytest.mark.soak, pytest.mark.short_soak]
    return [pytest.param(*_each(value), marks=marks if value in soak else []) for value in values]


def _each(value: Any) -> tuple[Any, ...]:
    """The values of a case: a tuple has one for each argument."""
    return value if isinstance(value, tuple) else (value,)


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks tests of the full tier, those left to soak, and those that run in the same one of several processes."""
    for _, cases in groupby(items, key=lambda item: (item.path, getattr(item, "originalname", item.name))):
        listed = list(cases)
        there = [item for item in listed if not item.get_closest_marker("soak")]
        covering = {there[number] for number in cover([_values(item) for item in there])}
        for item in listed:
            _mark(item, repeats=item not in covering)
            if group := _group(item):
                item.add_marker(pytest.mark.xdist_group(group))


def _mark(item: pytest.Item, repeats: bool) -> None:
    """Marks a case as one of the full tier, of soak or of the short soak."""
    fixtures, took = set(getattr(item, "fixturenames", ())), DURATIONS.get(durations.name(item.nodeid))
    slow, fast, needed = bool(SLOW & fixtures), item.get_closest_marker("fast"), notices_a_fault(item.nodeid)
    lengthy = (AT_LENGTH in fixtures and not needed) or (slow and repeats)
    too_long = took is not None and (took.case_s > LONG_S.case_s or took.test_s > LONG_S.test_s)
    by_hand = any(mark.name == "full" for mark in getattr(getattr(item, "function", None), "pytestmark", ()))
    long = too_long and not (needed or fast or AT_LENGTH in fixtures or by_hand)
    split_off = item.get_closest_marker("soak")
    if repeats or lengthy or ((slow or took) and not fast):
        item.add_marker(pytest.mark.full)
    if lengthy or long:
        item.add_marker(pytest.mark.soak)
    if (long and not split_off) or (item.get_closest_marker("soak") and "slurm" in fixtures):
        item.add_marker(pytest.mark.short_soak)


def notices_a_fault(node_id: str) -> bool:
    """Whether a case is one of those that a mutant names."""
    return any(mutant.names(node_id) for mutant in _MUTANTS.get(node_id.partition("::")[0], ()))


_MUTANTS = {
    file: [mutant for mutant in MUTANTS if mutant.test.partition("::")[0] == file]
    for file in {mutant.test.partition("::")[0] for mutant in MUTANTS}
}


def cover(cases: Sequence[frozenset[Value]]) -> list[int]:
    """Returns the numbers of cases that have each value at least once: again and again the one with most new values.

    Of several it is one whose other values are there the fewest times: so models are spread over the engine's settings.
    All cases where none has more than one value: there each is an example of its own.
    """
    if all(len(case) <= 1 for case in cases):
        return list(range(len(cases)))
    missing, chosen, times = frozenset().union(*cases), list[int](), Counter[Value]()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda number: (len(cases[number] & missing), -sum(times[one] for one in cases[number])),
        )
        chosen.append(best)
        missing -= cases[best]
        times.update(cases[best])
    return chosen


def _group(item: pytest.Item) -> str:
    """Returns what all tests share that run in the process of this one: the cluster, or fixtures of its module."""
    if "slurm" in getattr(item, "fixturenames", ()):
        return "slurm"
    fixtures = getattr(item, "_fixtureinfo", None)
    used = fixtures.name2fixturedefs.values() if fixtures else ()
    shares = any(definition.scope == "module" for definitions in used for definition in definitions)
    return item.nodeid.partition("::")[0] if shares else ""


def _values(item: pytest.Item) -> frozenset[Value]:
    spec = getattr(item, "callspec", None)
    if spec is None:
        return frozenset()
    marked = [_names(mark.args[0]) for mark in item.iter_markers("parametrize")]
    of_fixtures = [(name,) for name in spec.params if not any(name in names for names in marked)]
    return frozenset((*names, *(repr(spec.params[name]) for name in names)) for names in (*marked, *of_fixtures))


def _names(arguments: str | Sequence[str]) -> tuple[str, ...]:
    names = arguments.split(",") if isinstance(arguments, str) else arguments
    return tuple(name.strip() for name in names)
