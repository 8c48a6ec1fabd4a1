"""Micro-batches: exactly as many as can be, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.gpipe.microbatch import gather, scatter


@given(samples=st.integers(1, 40), chunks=st.integers(1, 50))
def test_scatter_gives_min_of_chunks_and_samples(samples: int, chunks: int) -> None:
    x = torch.arange(samples * 2).reshape(samples, 2)
    pieces = scatter(x, chunks)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == min(chunks, samples)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(gather(pieces), x)  # type: ignore[arg-type]


def test_tuples_are_cut_together() -> None:
    pieces = scatter((torch.arange(3), torch.arange(6).reshape(3, 2)), 2)
    assert [[t.tolist() for t in piece] for piece in pieces] == [[[0, 1], [[0, 1], [2, 3]]], [[2], [[4, 5]]]]


def test_different_numbers_of_samples() -> None:
    assert [tuple(map(len, piece)) for piece in scatter((torch.ones(3), torch.ones(4)), 2)] == [(2, 2), (1, 2)]
    with pytest.raises(ValueError, match=r"as many micro-batches each: got shapes \(3,\), \(4,\)"):
        scatter((torch.ones(3), torch.ones(4)), 4)
