"""What objects hold is put back in place, however deep it is; what others made is left alone."""

from __future__ import annotations

import collections
import itertools
import logging
import random
import threading
from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.nn import object_state
from harness.nn.object_state import Snapshot, hidden_modules


def same(value: Any) -> Any:
    return value


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Slotted:
    __slots__ = ("calls",)


def test_everything_holds_again_what_it_held() -> None:
    counter, slotted, members = Counter(), Slotted(), {1}
    slotted.calls = 0
    root = {"a": [deque([1]), (OrderedDict(x=1), defaultdict(int, y=1))], "o": SimpleNamespace(n=counter, s=slotted)}
    inside = root["a"][1]  # type: ignore[index]
    before = Snapshot([("root", root), ("set", members)], same)
    root["a"][0].append(2)  # type: ignore[index]
    inside[0]["x"] = inside[1]["z"] = 3
    counter(), setattr(slotted, "calls", 4), members.clear(), root.update(new=1), delattr(root["o"], "s")
    before.put(same)
    assert root == {"a": [deque([1]), ({"x": 1}, {"y": 1})], "o": SimpleNamespace(n=counter, s=slotted)}
    assert (counter.calls, slotted.calls, members) == (0, 0, {1})
    assert root["a"][1] is inside  # type: ignore[index]


def test_closures_methods_and_partial_functions_are_followed() -> None:
    calls, counter = 0, Counter()

    def count() -> None:
        nonlocal calls
        calls += 1

    before = Snapshot([("hook", partial(map, count)), ("method", counter.__call__)], same)
    count(), counter()
    before.put(same)
    assert (calls, counter.calls) == (0, 0)


@pytest.mark.parametrize(
    ("source", "draw"),
    [
        (torch.Generator().manual_seed(1), lambda g: torch.rand(3, generator=g).tolist()),
        (random.Random(1), lambda g: g.random()),
        (np.random.default_rng(1), lambda g: g.random()),
        (np.random.RandomState(1), lambda g: g.random()),
    ],
)
def test_random_numbers_are_drawn_again(source: Any, draw: Any) -> None:
    before = Snapshot([("source", [source])], same)
    first = draw(source)
    assert draw(source) != first
    before.put(same)
    assert draw(source) == first


def test_arrays_and_what_changes_of_them() -> None:
    one, other = np.zeros(3), np.ones(2)
    before = Snapshot([("arrays", [one, other])], same)
    one[1] = 5
    assert [array is one for array in before.changed_arrays()] == [True]
    before.put(same)
    assert one.tolist() == [0, 0, 0]


def test_loggers_locks_and_torch_are_left_alone() -> None:
    roots = [logging.getLogger("x"), threading.Lock(), torch.optim.SGD([torch.ones(1)], 1.0), nn.Linear(1, 1), "text"]
    assert not Snapshot([("root", root) for root in roots], same).held


def test_cycles_end_and_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle: list[Any] = [[] for _ in range(50)]
    cycle.append(cycle)
    assert len(Snapshot([("root", cycle)], same).held) == 51
    monkeypatch.setattr(object_state, "OBJECTS", 20)
    with pytest.raises(RuntimeError, match="'x' of Layer has more than 20 objects"):
        Snapshot([("'x' of Layer", cycle)], same)


def test_modules_that_torch_does_not_know() -> None:
    norm, counted = nn.Sequential(nn.BatchNorm1d(2)), itertools.count()
    assert set(hidden_modules([{"a": [SimpleNamespace(norm=norm)]}, counted])) == {norm, norm[0]}


def test_dictionaries_of_other_types_hold_again_what_they_held() -> None:
    counted, ordered = collections.Counter(a=2), OrderedDict(x=1, y=2)
    before = Snapshot([("counted", counted), ("ordered", ordered)], same)
    counted.update("aab")
    ordered.move_to_end("x")
    before.put(same)
    assert (counted, list(ordered.items())) == (collections.Counter(a=2), [("x", 1), ("y", 2)])
