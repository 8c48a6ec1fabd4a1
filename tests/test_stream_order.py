"""tests/support/stream_order.py and the GPUs of tests/support/fake_gpus.py: what a GPU could reorder is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.fake_gpus import fake_gpus
from tests.support.stream_order import HOST, Range, StreamOrder

X = Range(1, 0, 8)


def after(order: StreamOrder, waiting: str, other: str) -> None:
    order.join(waiting, order.clock(other))


def test_a_read_waits_for_the_write_or_is_a_fault() -> None:
    for waits in True, False:
        order = StreamOrder()
        order.launch("A", "f", writes=[X])
        if waits:
            after(order, "B", "A")
        order.launch("B", "g", reads=[X])
        assert bool(order.faults) is not waits


def test_order_goes_through_other_streams_and_the_host() -> None:
    for way in "C", HOST:
        order = StreamOrder()
        order.launch("A", "f", writes=[X])
        after(order, way, "A")
        if way != HOST:
            after(order, "B", way)
        order.launch("B", "g", writes=[X])
        assert order.faults == []


def test_what_comes_after_a_wait_is_not_covered_by_it() -> None:
    order = StreamOrder()
    after(order, "B", "A")
    order.launch("A", "f", writes=[X])
    order.launch("B", "g", reads=[X])
    assert order.faults == ["g on B, which reads, is not ordered after f on A, which writes,"]


def test_two_reads_and_other_bytes_do_not_conflict() -> None:
    order = StreamOrder()
    order.launch("A", "f", reads=[X], writes=[Range(2, 0, 8)])
    order.launch("B", "g", reads=[X], writes=[Range(2, 8, 16)])
    assert order.faults == []
    order.launch("B", "h", writes=[Range(2, 7, 9)])
    assert len(order.faults) == 1


def test_memory_goes_back_when_all_streams_are_through_or_the_allocator_knows_of_them() -> None:
    for how in "wait", "record", "host", "":
        order = StreamOrder()
        order.allocate(1, "A")
        order.launch("A", "f", writes=[X])
        after(order, "B", "A")
        order.launch("B", "g", reads=[X])
        if how == "wait":
            after(order, "A", "B")
        elif how == "record":
            order.record(1, "B")
        elif how == "host":
            after(order, HOST, "B")
        order.free(1)
        assert bool(order.faults) is (not how), how


def test_devices_of_tensors() -> None:
    with fake_gpus():
        x = torch.ones(3, device="cuda:1")
        layer = torch.nn.Linear(3, 2).to("cuda:1")
        assert [one.device for one in (x, x + 1, x[1:], layer(x), layer.weight)] == [torch.device("cuda", 1)] * 5
        assert x.to("cuda:0").is_cuda and not x.cpu().is_cuda
        assert torch.zeros_like(x, device="cpu").device.type == "cpu" == torch.ones(2).device.type


@pytest.mark.parametrize(
    ("uses", "faults"),
    [
        (lambda x, s: s.wait_stream(torch.cuda.current_stream("cuda:0")), 0),
        (lambda x, s: s.wait_event(torch.cuda.current_stream("cuda:0").record_event()), 0),
        (lambda x, s: torch.cuda.synchronize("cuda:0"), 0),
        (lambda x, s: float(x.sum()), 0),
        (lambda x, s: x.cpu(), 0),
        (lambda x, s: torch.zeros(4).pin_memory().copy_(x, non_blocking=True), 1),
        (lambda x, s: None, 1),
    ],
    ids=["wait_stream", "wait_event", "synchronize", "a number is read", "copied to the host", "later", "nothing"],
)
def test_what_orders_two_streams(uses: Callable[[Tensor, torch.cuda.Stream], object], faults: int) -> None:
    with fake_gpus() as order:
        x = torch.ones(4, device="cuda:0") * 2
        stream = torch.cuda.Stream("cuda:0")
        uses(x, stream)
        with torch.cuda.stream(stream):
            x.mul_(2)
        torch.cuda.synchronize("cuda:0")
        assert bool(order.faults) == bool(faults)


def test_a_copy_between_gpus_is_in_the_streams_of_both() -> None:
    with fake_gpus() as order:
        x = torch.ones(4, device="cuda:0") * 2
        y = x.to("cuda:1", non_blocking=True) * 3
        assert y.device == torch.device("cuda", 1)
        x.add_(1)
        assert order.faults == []
        (x + y).sum()
        assert order.faults[0] == "add has tensors of GPUs [0, 1]"


def test_memory_that_another_stream_reads() -> None:
    for recorded in True, False:
        with fake_gpus() as order:
            x = torch.ones(4, device="cuda:0") * 2
            stream = torch.cuda.Stream("cuda:0")
            stream.wait_stream(torch.cuda.current_stream("cuda:0"))
            with torch.cuda.stream(stream):
                x.sum()
            if recorded:
                x.record_stream(stream)
            del x
            assert bool(order.faults) is not recorded
