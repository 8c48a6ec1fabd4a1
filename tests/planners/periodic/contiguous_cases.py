"""Small chains, and every way to cut them into consecutive stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from harness.core.cluster import Duplex
from harness.core.plan import Stage
from planners.periodic.layer_ticks import Chain, Shared
from tests.planners.strategies import cuttings


def chain(
    loads: list[tuple[int, int]], messages: list[int] | None = None, memory: int = 10**6, duplex: Duplex = "half"
) -> Chain:
    """Layers of (forward, backward) ticks that store a byte each; messages, as gradients, take so many ticks."""
    inner = messages or [0] * (len(loads) - 1)
    crossing = (0, *inner, 0)
    return Chain(
        forward=tuple(forward for forward, _ in loads),
        backward=tuple(backward for _, backward in loads),
        state=(0,) * len(loads),
        stored=(1,) * len(loads),
        sent=crossing,
        returned=crossing,
        buffers=(0,) * (len(loads) + 1),
        memory=memory,
        duplex=duplex,
    )


@st.composite
def chains(draw: st.DrawFn, most: int = 6, shortest: int = 0, longest: int = 5, messages: int = 5) -> Chain:
    """Chains of up to `most` layers with `shortest` to `longest` ticks each way, and up to `messages` for a message."""
    layers = draw(st.integers(1, most))

    def numbers(largest: int, least: int = 0) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, largest)) for _ in range(layers))

    def boundaries(largest: int) -> tuple[int, ...]:
        return (0, *(draw(st.integers(0, largest)) for _ in range(layers - 1)), 0)

    return with_shared(draw, Chain(
        numbers(longest, shortest), numbers(longest, shortest), numbers(4), numbers(6), boundaries(messages),
        boundaries(messages), boundaries(2), draw(st.integers(1, 60)), duplex=draw(st.sampled_from(["half", "full"])),
    ))  # fmt: skip


def with_shared(draw: st.DrawFn, some: Chain) -> Chain:
    """Now and then, some layers have more state in common: 1 or 2 bytes that count once on a device."""
    shared = tuple(
        Shared(draw(st.integers(1, 2)), tuple(layers))
        for _ in range(draw(st.sampled_from((0, 0, 1, 2))))
        if (layers := sorted(draw(st.sets(st.integers(0, some.layers - 1), min_size=1, max_size=3))))
    )
    more = (sum(one.bytes for one in shared if n in one.layers) for n in range(some.layers))
    state = tuple(own + extra for own, extra in zip(some.state, more, strict=True))
    return replace(some, state=state, shared=shared)


def partitions(layers: int, devices: int) -> Iterator[tuple[Stage, ...]]:
    """All of at most so many consecutive stages, those of fewer stages first."""
    for count in range(1, min(layers, devices) + 1):
        for sizes in cuttings(layers, count):
            yield into(sizes)


def into(sizes: tuple[int, ...] | list[int]) -> tuple[Stage, ...]:
    """Stage j has `sizes[j]` layers and is on device j."""
    ends = [sum(sizes[: j + 1]) for j in range(len(sizes))]
    return tuple(Stage(end - size, end - 1, j) for j, (size, end) in enumerate(zip(sizes, ends, strict=True)))
