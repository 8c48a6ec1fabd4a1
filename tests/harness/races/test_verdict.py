"""Ratios, ranks and intervals, on rounds whose truth is known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.races import verdict
from harness.races.verdict import LEAST_ROUNDS, Ratio
from tests.tiers import examples

TIMES = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12)


@given(TIMES)
def test_the_reference_has_the_speed_one(times: list[float]) -> None:
    assert verdict.ratio(times, times) == Ratio(1.0, 1.0, 1.0)


@given(TIMES, st.floats(0.1, 10.0))
def test_what_slows_all_of_them_in_a_round_changes_no_ratio(times: list[float], factor: float) -> None:
    found = verdict.ratio([factor * one for one in times], times)
    assert (found.value, found.low, found.high) == pytest.approx((1 / factor,) * 3)


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6))
def test_the_interval_has_the_true_ratio_nearly_always(seed: int) -> None:
    """19 of 20 by its definition; 12 of 16 here, where 7 rounds are few."""
    dice = random.Random(seed)
    inside = 0
    for _ in range(16):
        common = [dice.uniform(0.5, 2.0) for _ in range(15)]
        own = [one * dice.gauss(0.5, 0.02) for one in common]
        other = [one * dice.gauss(1.0, 0.02) for one in common]
        found = verdict.ratio(own, other)
        inside += found.low <= 2.0 <= found.high
    assert inside >= 12


def test_a_hiccup_is_no_part_of_a_step_time() -> None:
    assert verdict.step_time_s([1.0, 1.1, 50.0, 1.2]) == pytest.approx(1.15)
    assert verdict.step_time_s([1.0, 3.0]) == 2.0
    assert verdict.step_time_s([*range(1, 21)]) == 10.5, "without 1, 2, 19 and 20"


def test_its_interval_is_narrower_than_that_of_medians() -> None:
    dice = np.random.default_rng(0)
    own, other = dice.normal(1.0, 0.1, (2, 100))
    found = verdict.ratio(own, other)
    drawn = dice.integers(0, 100, (2000, 100))
    low, high = np.quantile(np.median(other[drawn], axis=1) / np.median(own[drawn], axis=1), [0.025, 0.975])
    assert found.high - found.low < 0.9 * (high - low)


def test_a_race_is_decided_once_all_ratios_are_known() -> None:
    steady = {"a": [1.0] * LEAST_ROUNDS, "b": [0.5] * LEAST_ROUNDS}
    assert verdict.is_decided(steady)
    assert not verdict.is_decided({name: own[1:] for name, own in steady.items()}), "too few rounds"
    assert not verdict.is_decided(steady | {"c": [1.0, 2.0] * (LEAST_ROUNDS // 2) + [1.0]}), "c is not known"


def test_differences_within_noise_share_a_rank() -> None:
    noisy = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98]
    found = verdict.places({"a": noisy, "b": noisy[::-1], "c": [3 * one for one in noisy], "d": [0.5] * 7})
    assert {name: place.rank for name, place in found.items()} == {"d": 1, "a": 2, "b": 2, "c": 4}
    assert [name for name, place in found.items() if not place.resolved] == ["b"], "its interval is wide"
    assert [str(found[name]) for name in "dabc"] == ["1", "2", "2?", "4"]


def test_many_equal_ones_share_a_rank_nearly_always() -> None:
    """One of 28 pairs would differ by chance in a third of all races."""
    dice, shared = random.Random(0), 0
    for _ in range(20):
        rounds_s = {name: [dice.gauss(1.0, 0.01) for _ in range(15)] for name in "abcdefgh"}
        shared += {place.rank for place in verdict.places(rounds_s).values()} == {1}
    assert shared >= 18


def test_equal_ones_are_a_tie_that_is_resolved() -> None:
    found = verdict.places({"a": [1.0] * 7, "b": [1.0] * 7})
    assert [str(place) for place in found.values()] == ["1", "1"]


@pytest.mark.parametrize(("rounds", "resolved"), [(1, False), (6, False), (7, True)])
def test_of_few_rounds_nothing_is_resolved(rounds: int, resolved: bool) -> None:
    """The interval of a single one has no width."""
    found = verdict.places({"a": [1.0] * rounds, "b": [2.0] * rounds})
    assert found == {"a": verdict.Place(1, resolved), "b": verdict.Place(2, resolved)}


def test_no_rounds_have_no_ranks() -> None:
    assert verdict.places({}) == {} and verdict.regret({}, {}) is None and verdict.kendalls_tau([], []) is None


@pytest.mark.parametrize(
    ("ranks", "predicted", "tau"),
    [([1, 2, 3], [0.1, 0.2, 0.3], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([1, 1], [1, 2], None), ([1], [1], None)],
)
def test_kendalls_tau(ranks: list[float], predicted: list[float], tau: float | None) -> None:
    assert verdict.kendalls_tau(ranks, predicted) == (tau if tau is None else pytest.approx(tau))


def test_what_the_predicted_best_costs() -> None:
    assert verdict.regret({"a": 1.0, "b": 1.5}, {"a": 0.9, "b": 0.8}) == ("b", 1.5)
    assert verdict.regret({"a": 1.0, "b": 1.5}, {"a": 0.9}) == ("a", 1.0)
