"""Alpha and beta from timings: exact on exact ones, the best without negative numbers on others."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from harness.core.cluster import Cluster, Link
from harness.measure.alpha_beta_fit import Fit, Timing, better, fit, middle
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Grid
from harness.simulator.routes import STEPS

WEIGHTS = ("plain", "relative")
SIZES = [4**exponent for exponent in range(5, 14)]
what = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(2, 64), st.sampled_from(SIZES))


def timing(name: str, members: int, size: int, alpha: float, beta: float) -> Timing:
    """As table 2 prints it."""
    rounds = 2 if name == "all_reduce" else 1
    return Timing(name, members, size, rounds * ((members - 1) * alpha + (members - 1) / members * size * beta))


def all_timings(alpha: float, beta: float) -> list[Timing]:
    return [timing(name, k, size, alpha, beta) for name in STEPS for k in (2, 3, 4, 8) for size in SIZES]


@given(st.lists(what, min_size=2, max_size=20), st.just(0.0) | st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-8))
@pytest.mark.parametrize("weights", WEIGHTS)
def test_exact_timings_give_alpha_and_beta_back(weights, cells, alpha, beta):
    shares = [size / members for _, members, size in cells]
    assume(max(shares) >= 2 * min(shares))
    timings = [timing(*cell, alpha, beta) for cell in cells]
    found = fit(timings, weights)
    longest = max(t.seconds for t in timings)
    assert found.alpha_s == pytest.approx(alpha, abs=1e-9 * longest)
    assert found.beta_s_per_byte == pytest.approx(beta, abs=1e-9 * longest / max(shares))
    assert found.r2 == pytest.approx(1, abs=1e-9)
    assert found.factor(timings) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_times_without_bandwidth_and_without_latency(weights):
    assert fit(all_timings(1e-5, 0.0), weights).beta_s_per_byte == pytest.approx(0, abs=1e-18)
    assert fit(all_timings(0.0, 1e-9), weights).alpha_s == pytest.approx(0, abs=1e-12)


@given(st.lists(st.tuples(what, st.floats(1e-6, 10.0)), min_size=2, max_size=20))
@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_pair_without_negative_numbers_fits_better(weights, cells):
    timings = [Timing(*cell, seconds) for cell, seconds in cells]
    assume(len({t.bytes / t.members for t in timings}) > 1)
    found = fit(timings, weights)
    assert found.alpha_s >= 0 and found.beta_s_per_byte >= 0
    seconds = np.array([t.seconds for t in timings])
    scale = 1 / seconds if weights == "relative" else np.ones(len(seconds))
    rows = np.array([[t.messages, t.sent / 1e6] for t in timings]) * scale[:, None]
    _, best = nnls(rows, seconds * scale)
    left = np.linalg.norm(rows @ [found.alpha_s, found.beta_s_per_byte * 1e6] - seconds * scale)
    assert left <= best * (1 + 1e-6) + 1e-9 * np.linalg.norm(seconds * scale)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_fit_predicts_what_the_cost_model_says(weights):
    """One definition of bytes and steps for measuring, fitting and planning."""
    found = Fit(weights, 3e-6, 2e-10, 1.0)
    grid = Grid(1, 24)
    planned = Collectives(Cluster(devices_per_node=24, intra=Link(3e-6, 2e-10)), grid)
    for one in all_timings(1e-5, 1e-9):
        want = planned.seconds(one.name, grid.degree(1, one.members), one.bytes)
        assert found.seconds(one) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_tenth_moves_them_little(seed):
    draw = random.Random(seed)
    exact = all_timings(2e-5, 1e-9)
    noisy = [Timing(t.name, t.members, t.bytes, t.seconds * draw.uniform(0.9, 1.1)) for t in exact]
    plain, relative = fit(noisy, "plain"), fit(noisy, "relative")
    for found in (plain, relative):
        assert found.beta_s_per_byte == pytest.approx(1e-9, rel=0.05)
        assert 0.98 < found.r2 < 1
    assert relative.alpha_s == pytest.approx(2e-5, rel=0.05), "small messages count as much as large ones"


def test_plain_follows_the_large_messages_and_relative_the_small_ones():
    """Large messages at half the bandwidth of the others, as where they fall out of a cache."""
    timings = [timing("all_gather", 2, size, 1e-4, 1e-9 if size < 10**7 else 2e-9) for size in SIZES]
    plain, relative = fit(timings, "plain"), fit(timings, "relative")
    small, large = timings[:6], timings[-1:]
    assert plain.factor(large) < relative.factor(large)
    assert relative.factor(small) < plain.factor(small)
    assert better((plain, relative), timings) is relative
    assert plain.r2 > relative.r2, "what plain makes largest"


def test_the_middle_is_the_middle_half_of_the_orders_of_magnitude():
    timings = [timing("all_gather", 2, 10**exponent, 1e-5, 1e-9) for exponent in range(1, 10)]
    assert [t.bytes for t in middle(timings)] == [10**exponent for exponent in range(3, 8)]
    assert middle(timings[:2]) == timings[:2], "none is there"


def test_a_fit_without_bandwidth_is_chosen_only_where_all_are():
    timings = all_timings(1e-3, 1e-14)
    none, some = Fit("plain", 1e-3, 0.0, 1.0), Fit("relative", 5e-3, 1e-12, 0.9)
    assert better((none, some), timings) is some
    assert better((none, none), timings) is none


def test_factors_count_both_ways():
    timings = [timing("all_gather", 2, size, 1e-5, 1e-9) for size in SIZES]
    for scale in (0.5, 2.0):
        assert Fit("plain", scale * 1e-5, scale * 1e-9, 1.0).factor(timings) == pytest.approx(2)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_equal_times_have_nothing_to_explain(weights):
    same = [Timing("all_gather", 2, size, 0.1) for size in SIZES]
    found = fit(same, weights)
    assert (found.r2, found.alpha_s) == (1.0, pytest.approx(0.1))
    assert Fit("plain", 0.2, 0.0, 1.0).r2_of(same) == 0.0


def test_r2_of_other_timings():
    timings = all_timings(1e-5, 1e-9)
    assert fit(timings).r2_of(timings) == pytest.approx(fit(timings).r2)
    mean = sum(t.seconds for t in timings) / len(timings)
    wrong = Fit("plain", 0.0, 1e-12, 1.0)
    left = sum((t.seconds - wrong.seconds(t)) ** 2 for t in timings)
    assert wrong.r2_of(timings) == pytest.approx(1 - left / sum((t.seconds - mean) ** 2 for t in timings))


@pytest.mark.parametrize(
    ("timings", "reported"),
    [
        ([], "these 0 timings have 0 -> time a small and a large message"),
        ([Timing("all_reduce", 2, 1000, 1.0)] * 3, "these 3 timings have 1 ->"),
        ([Timing("all_reduce", 2, 1000, 1.0), Timing("all_gather", 4, 2000, 2.0)], "at least 2 sizes .bytes / members"),
    ],
    ids=["none", "one size", "sizes that grow with the members"],
)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_timings_that_do_not_separate_alpha_from_beta(weights, timings, reported):
    with pytest.raises(ValueError, match=reported):
        fit(timings, weights)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"name": "broadcast"}, "name is 'broadcast', must be one of all_reduce, reduce_scatter"),
        ({"members": 1}, "members is 1, must be at least 2"),
        ({"bytes": 0}, "bytes is 0, must be at least 1"),
        ({"seconds": 0.0}, "seconds is 0.0, must be finite and above 0"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"seconds": math.inf}, "seconds is inf"),
    ],
)
def test_what_no_timing_can_be(change, reported):
    with pytest.raises(ValueError, match=reported):
        Timing(**{"name": "all_reduce", "members": 2, "bytes": 8, "seconds": 1.0} | change)
