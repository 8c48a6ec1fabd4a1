"""Small random models, and every way to cut them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import strategies as st

from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied

SIZES = st.integers(0, 20)
TIMES = st.integers(1, 20).map(float)


def cuttings(elements: int, blocks: int) -> Iterator[tuple[int, ...]]:
    """The sizes of all partitions into consecutive, non-empty blocks."""
    for cuts in combinations(range(1, elements), blocks - 1):
        edges = (0, *cuts, elements)
        yield tuple(end - begin for begin, end in pairwise(edges))


@st.composite
def profiles(draw: st.DrawFn, max_layers: int = 7) -> ModelProfile:
    count = draw(st.integers(1, max_layers))
    layers = tuple(
        LayerProfile(
            f"layer_{i}", draw(TIMES), draw(TIMES), param_bytes=draw(SIZES), buffer_bytes=draw(SIZES),
            output_bytes=draw(SIZES), saved_bytes=draw(SIZES),
        )
        for i in range(count)
    )  # fmt: skip
    for name in ("a", "b"):  # a parameter that some layers share
        owners = [i for i in range(count) if draw(st.integers(0, 3)) == 0]
        if len(owners) > 1:
            size = min(layers[i].param_bytes - sum(tied.bytes for tied in layers[i].tied) for i in owners)
            layers = tuple(
                replace(layer, tied=(*layer.tied, Tied(name, size))) if i in owners else layer
                for i, layer in enumerate(layers)
            )
    edges = list(combinations(range(count), 2))
    chosen = draw(st.lists(st.sampled_from(edges), max_size=3, unique=True)) if edges else []
    skips = tuple(Skip(source, target, draw(SIZES), f"skip_{source}_{target}") for source, target in chosen)
    return ModelProfile(layers, "random", input_bytes=draw(SIZES), skips=skips, source="analytic on paper")
