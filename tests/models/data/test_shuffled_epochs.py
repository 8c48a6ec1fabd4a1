"""The walk through samples: each once in an epoch, and a pure function of seed and place."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.shuffled_epochs import Walk, generator
from tests.tiers import examples


@settings(max_examples=examples(40))
@given(samples=st.integers(1, 20), count=st.integers(1, 30), steps=st.integers(1, 8))
def test_each_sample_comes_once_in_an_epoch(samples: int, count: int, steps: int) -> None:
    walk = Walk(samples, seed=0)
    order = [i for step in range(steps) for i in walk.chosen(step * count, count).tolist()]
    assert len(order) == steps * count
    for first in range(0, len(order) - samples + 1, samples):
        assert sorted(order[first : first + samples]) == list(range(samples))
    rest = order[len(order) // samples * samples :]
    assert len(set(rest)) == len(rest)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=6), st.integers(0, 3))
def test_what_was_asked_before_makes_no_difference(asked: list[tuple[int, int]], seed: int) -> None:
    walk = Walk(13, seed)
    for first, count in asked:
        assert torch.equal(walk.chosen(first, count), Walk(13, seed).chosen(0, 300)[first : first + count])


def test_epochs_and_seeds_have_different_orders() -> None:
    one, other = (Walk(20, seed).chosen(0, 40).tolist() for seed in (0, 1))
    assert len({tuple(part) for part in (one[:20], one[20:], other[:20], other[20:], range(20))}) == 5


def test_near_keys_give_unrelated_numbers() -> None:
    first = {torch.rand(1, generator=generator("order", seed, epoch)).item() for seed in range(9) for epoch in range(9)}
    assert len(first) == 81
    assert torch.equal(torch.rand(3, generator=generator("a", 1)), torch.rand(3, generator=generator("a", 1)))
