"""tests/support/collective_order.py finds what would not end on NCCL, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.collective_order import Call, Event, Log, faults

BOTH = (0, 1)
SIZE = "8 bytes of torch.float32"


def log(*events: Call | int, thread: str = "main", first: int = 0) -> Log:
    """A call, or the number of the call that is waited for."""
    numbers = iter(range(first, first + len(events)))
    return [Event(thread, event) if isinstance(event, int) else Event(thread, next(numbers), event) for event in events]


def send(peer: int, tag: int = 0, batch: int | None = None, group: str = "all", what: str = SIZE) -> Call:
    return Call("send", group, BOTH, what, peer, tag, batch)


def receive(peer: int, tag: int = 0, batch: int | None = None, group: str = "all", what: str = SIZE) -> Call:
    return Call("receive", group, BOTH, what, peer, tag, batch)


def all_reduce(group: str = "all", what: str = SIZE) -> Call:
    return Call("collective", group, BOTH, f"allreduce_ {what}")


def test_a_message_and_a_collective_end() -> None:
    assert faults([log(send(1), 0, all_reduce(), 1), log(receive(0), 0, all_reduce(), 1)]) == []


def test_both_send_first() -> None:
    """The pair has one communicator for both directions: also without a wait between."""
    for waits in [0], []:
        found = faults([log(send(1), *waits, receive(1)), log(send(0), *waits, receive(0))])
        assert found == ["rank 0 stands at: send to 1", "rank 1 stands at: send to 0"]


def test_both_at_once_in_a_batch_or_in_groups_of_their_own() -> None:
    batches = [log(send(peer, batch=7), receive(peer, batch=7), 0, 1) for peer in (1, 0)]
    assert faults(batches) == []
    assert (
        faults([log(send(1, group="a"), receive(1, group="b")), log(send(0, group="b"), receive(0, group="a"))]) == []
    )


def test_a_wait_between_is_a_cycle_in_groups_of_their_own() -> None:
    crossed = [log(send(1, group="a"), 0, receive(1, group="b")), log(send(0, group="b"), 0, receive(0, group="a"))]
    assert len(faults(crossed)) == 2
    threads = [
        [*log(send(1, group="a"), 0), *log(receive(1, group="b"), 1, thread="other", first=1)],
        [*log(send(0, group="b"), 0), *log(receive(0, group="a"), 1, thread="other", first=1)],
    ]
    assert faults(threads) == [], "each thread waits for its own"


def test_a_batch_on_one_side_alone() -> None:
    """Its messages are in another communicator than a message that was sent alone."""
    (found, *_) = faults([log(send(1, batch=0)), log(receive(0))])
    assert "1 are sent, 0 received" in found


def test_collectives_in_another_order() -> None:
    two, three = all_reduce(what="2 bytes"), all_reduce(what="3 bytes")
    assert "collective 0" in faults([log(two, three), log(three, two)])[0]
    assert "rank 0 has 2 collectives, rank 1 1" in faults([log(two, three), log(two)])[0]


def test_groups_in_another_order_with_a_wait_between() -> None:
    """Rank 0 reduces in group a first and waits, rank 1 in group b."""
    a, b = all_reduce("a"), all_reduce("b")
    assert len(faults([log(a, 0, b, 1), log(b, 0, a, 1)])) == 2
    assert faults([log(a, b, 0, 1), log(b, a, 0, 1)]) == [], "none waits for the other"


@pytest.mark.parametrize(
    ("one", "other"),
    [(send(1, what="4 bytes"), receive(0)), (send(1, tag=1), receive(0, tag=2))],
    ids=["another size", "another tag"],
)
def test_messages_that_would_be_mixed_up(one: Call, other: Call) -> None:
    assert "number 0 is" in faults([log(one), log(other)])[0]


def test_a_message_that_nobody_receives() -> None:
    assert "1 are sent, 0 received" in faults([log(send(1)), []])[0]
