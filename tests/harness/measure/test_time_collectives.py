"""Real collectives among real ranks: that they are the ones that are named, on the bytes that are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.launch import forked_ranks
from harness.measure.time_collectives import TRIES, _collective, group_sizes, measure, message_sizes
from harness.simulator.routes import STEPS


@pytest.mark.parametrize(
    ("devices", "sizes"),
    [(2, [2]), (3, [2, 3]), (4, [2, 3, 4]), (6, [2, 3, 4, 6]), (8, [2, 3, 4, 8]), (9, [2, 3, 4, 8, 9])],
)
def test_groups_are_small_doubled_and_all(devices: int, sizes: list[int]) -> None:
    assert group_sizes(devices) == sizes


def test_messages_grow_fourfold() -> None:
    assert message_sizes(2**20) == [2**12, 2**14, 2**16, 2**18, 2**20]
    assert message_sizes(2**21)[-1] == 2**20


def test_two_ranks_time_everything(tmp_path: Path) -> None:
    reported = tmp_path / "reported"

    def say(text: str) -> None:
        with reported.open("a") as file:
            file.write(f"{text}\n")

    found = measure(["cpu", "cpu"], rounds=3, warmup=1, say=say, sizes=[4, 4096, 100_003])
    assert (found.backend, found.rounds) == ("gloo", 3)
    assert [(t.name, t.members, t.bytes) for t in found.timings] == [
        (name, 2, size) for name in STEPS for size in (8, 4096, 100_000)
    ]
    for timing in found.timings:
        assert timing.spread_s is not None
        assert 0 < timing.spread_s[0] <= timing.seconds <= timing.spread_s[1] < 1
    assert reported.read_text().splitlines() == [f"2 ranks: round {number} of 4" for number in range(1, 5)]


def test_one_round_without_warmup_is_enough() -> None:
    found = measure(["cpu", "cpu"], rounds=1, warmup=0, sizes=[4096])
    assert len(found.timings) == len(STEPS) and TRIES > 1
    large = measure(["cpu", "cpu"], rounds=1, warmup=0, sizes=[2**21]).timings[0]
    assert large.spread_s == (large.seconds, large.seconds), "a large message is timed once in a round"


def test_each_is_the_collective_of_its_name() -> None:
    """The buffer whose bytes count is the whole one; the other has a share of it, or is as large."""

    def work() -> dict[str, list[list[float]]]:
        rank, members, count = dist.get_rank(), 3, 6
        found = {}
        for name in STEPS:
            whole = torch.arange(count) + 10.0 * rank
            other = torch.full((count,), float(rank))
            _collective(name, whole, other, members)()
            found[name] = [whole.tolist(), other.tolist()]
        return found

    found = forked_ranks.run_on_ranks(3, work, ["cpu"] * 3)
    before = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert found["all_reduce"][0] == [3 * value + 30 for value in before]
    assert found["reduce_scatter"] == [before, [30.0, 33.0, 0.0, 0.0, 0.0, 0.0]]
    assert found["all_gather"] == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0], [0.0] * 6]
    assert found["all_to_all"] == [before, [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]]
