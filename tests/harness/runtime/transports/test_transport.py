"""Both transports: what is sent comes, in order of arrival, while the rank computes, and waiting costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.problem import ProblemError
from harness.launch import forked_ranks
from harness.runtime.transports.transport import HEADER, Channel, Coming, Position, Transport, _form, _header
from tests.problems import keys, refused

pytestmark = pytest.mark.usefixtures("ranks")

T = TypeVar("T")
DATA = Channel(0, 1)
SKIP = Channel(0, 1, "up")
CHANNELS = [DATA, SKIP, DATA.back, SKIP.back]
M = 6
KINDS = ("mpi", "torch")


def between(kind: str, work: Callable[[Transport], T]) -> list[T]:
    """What `work` returns in each of two ranks, stage 0 and stage 1."""

    def run() -> list[T]:
        if kind == "mpi":
            from harness.runtime.transports.mpi_transport import MPITransport as Chosen
        elif kind == "direct":
            from harness.runtime.transports.torch_transport import DirectTransport as Chosen  # type: ignore[assignment]
        else:
            from harness.runtime.transports.torch_transport import TorchTransport as Chosen  # type: ignore[assignment]
        rank = dist.get_rank()
        transport = Chosen(Position(rank, rank, (0, 1), 1), CHANNELS, M, torch.device("cpu"))
        found: list[T] = [None, None]  # type: ignore[list-item]
        try:
            dist.all_gather_object(found, work(transport))
        finally:
            transport.close()
        return found

    return forked_ranks.run_on_ranks(2, run, ("cpu",) * 2, with_mpi=kind == "mpi")


def test_ranks_that_share_memory_are_rarely_interrupted() -> None:
    assert between("mpi", lambda transport: transport._pause_s) == [1e-2, 1e-2]  # type: ignore[attr-defined]


def sample(i: int, samples: int) -> list[Tensor]:
    """A tuple of different tensors; one is not contiguous, one is large enough that MPI waits for the other side."""
    torch.manual_seed(i)
    return [
        torch.randn(samples, 3).to(torch.bfloat16), torch.randn(samples, 4, 5, dtype=torch.float64).transpose(1, 2),
        torch.randn(samples, 30_000), torch.randn(samples, 1).half(), torch.randn(()),
    ]  # fmt: skip


def received(transport: Transport, count: int) -> dict[tuple[Channel, int], list[Tensor]]:
    found: dict[tuple[Channel, int], list[Tensor]] = {}
    last_s = 0.0
    while len(found) < count:
        for one in transport.arrived(wait=True):
            assert one.at_s >= last_s, "in the order of arrival"
            found[one.channel, one.micro_batch], last_s = one.tensors, one.at_s
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_comes(kind: str) -> None:
    """Tuples of every dtype, on two channels between the same ranks, in two sizes, in two steps."""
    coming = [Coming(i, 2 if i < 4 else 1) for i in range(M)]

    def work(transport: Transport) -> list[int]:
        first = transport.position.device == 0
        sent = []
        for step in range(2):
            transport.begin({channel: coming if channel in (DATA, SKIP) else [] for channel in transport.into})
            for what in coming if first else ():
                for channel, offset in ((SKIP, 100), (DATA, 0)):
                    sent.append(transport.send(channel, what, sample(what.micro_batch + offset + step, what.samples)))
            if not first:
                got = received(transport, 2 * M)
                for what in coming:
                    for channel, offset in ((SKIP, 100), (DATA, 0)):
                        wanted = sample(what.micro_batch + offset + step, what.samples)
                        found = got[channel, what.micro_batch]
                        assert [one.dtype for one in found] == [one.dtype for one in wanted]
                        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            transport.finish()
            dist.barrier()
        return sent

    sent, nothing = between(kind, work)
    assert nothing == []
    assert sent[0] == sum(one.numel() * one.element_size() for one in sample(0, 2))
    assert len(sent) == 4 * M


def test_every_channel_of_torch_is_used_before_receives_are_posted() -> None:
    """NCCL connects two ranks at their first message."""

    def run() -> list[list[str]]:
        from harness.runtime.transports import torch_transport

        rank, used = dist.get_rank(), list[str]()
        send, recv = dist.send, dist.recv
        torch_transport.dist.send = lambda *to: (used.append("send"), send(*to))
        torch_transport.dist.recv = lambda *of: (used.append("recv"), recv(*of))
        position = Position(rank, rank, (0, 1), 1)
        transport = torch_transport.TorchTransport(position, CHANNELS, M, torch.device("cpu"))
        transport.close()
        found: list[list[str]] = [[], []]
        dist.all_gather_object(found, used)
        return found

    assert forked_ranks.run_on_ranks(2, run, ("cpu",) * 2) == [
        ["send", "send", "recv", "recv"],
        ["recv", "recv", "send", "send"],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_forms_travel_once_for_each_size(kind: str) -> None:
    coming = [Coming(0, 2), Coming(1, 2), Coming(2, 1), Coming(3, 2)]

    def work(transport: Transport) -> list[int]:
        parts: list[int] = []
        begin = transport._send

        def counted(channel: Channel, i: int, tensors: list[Tensor]) -> None:
            parts.append(tensors[0].numel())
            begin(channel, i, tensors)

        transport._send = counted  # type: ignore[method-assign]
        transport.begin({channel: coming if channel == DATA else [] for channel in transport.into})
        for what in coming if transport.position.device == 0 else ():
            transport.send(DATA, what, [torch.zeros(what.samples, 5)])
        if transport.position.device == 1:
            received(transport, len(coming))
        transport.finish()
        return parts

    assert between(kind, work)[0] == [HEADER, 10, 10, HEADER, 5, 10]


def test_headers() -> None:
    form = ((torch.float16, (2, 3)), (torch.float64, ()), (torch.bfloat16, (0, 5, 1)))
    assert _form(_header(form)) == form
    with pytest.raises(ProblemError) as caught:
        _header(((torch.float32, (1, 2)),) * (HEADER // 4))
    assert keys(refused(caught)) == [f"{HEADER // 4} tensors"]


def test_another_form_for_as_many_samples_is_refused() -> None:
    def work(transport: Transport) -> str:
        transport.begin({channel: [Coming(0, 2)] if channel == DATA else [] for channel in transport.into})
        if transport.position.device == 1:
            received(transport, 1)
            return ""
        transport.send(DATA, Coming(0, 2), [torch.zeros(2, 5)])
        transport.finish()
        with pytest.raises(ProblemError) as caught:
            transport.send(DATA, Coming(1, 2), [torch.zeros(2, 6)])
        (problem,) = refused(caught)
        return f"{problem.key} -> {problem.hint}"

    assert between("torch", work)[0] == "1copy1<0 -> inputs of one shape"


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_while_the_receiver_computes(kind: str) -> None:
    """Eight megabytes, of which MPI moves nothing while nobody calls it: they are there long before one looks."""
    large = torch.ones(1 << 21)

    def work(transport: Transport) -> float:
        coming = [Coming(0, 1), Coming(1, 1)]
        transport.begin({channel: coming if channel == DATA else [] for channel in transport.into})
        if transport.position.device == 0:
            transport.send(DATA, coming[0], [large])
            dist.barrier()
            transport.send(DATA, coming[1], [large])
            compute(1.0)
            transport.finish()
            return 0.0
        received(transport, 1)
        dist.barrier()
        end = compute(1.0)
        (one,) = transport.arrived(wait=True)
        transport.finish()
        assert torch.equal(one.tensors[0], large)
        return end - one.at_s

    assert between(kind, work)[1] > 0.3, "seconds before the end of the computation"


def compute(seconds: float) -> float:
    """Products of matrices for so long; when they ended."""
    end, x = time.perf_counter() + seconds, torch.randn(200, 200)
    while time.perf_counter() < end:
        x = torch.tanh(x @ x)
    return time.perf_counter()


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_does_not_spin(kind: str) -> None:
    """Seconds of CPU over seconds of waiting; one that spins has 1."""
    waits_s = 1.0

    def work(transport: Transport) -> float:
        transport.begin({channel: [Coming(0, 1)] if channel == DATA else [] for channel in transport.into})
        dist.barrier()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if transport.position.device == 0:
            time.sleep(waits_s)
            transport.send(DATA, Coming(0, 1), [torch.zeros(3)])
            transport.finish()
            return 0.0
        received(transport, 1)
        share = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
        transport.finish()
        return share

    assert between(kind, work)[1] < 0.3


def test_who_receives_in_a_fixed_order_gets_it_and_keeps_nothing() -> None:
    """In the order of each channel, whichever is asked for; what was sent is forgotten once it is delivered."""
    coming = [Coming(i, 2) for i in range(M)]

    def work(transport: Transport) -> list[int]:
        left = []
        transport.begin(dict.fromkeys(transport.into, coming))
        if transport.position.device == 0:
            for what in coming:
                for channel in (SKIP, DATA):
                    transport.send(channel, what, sample(what.micro_batch, 2))
            for what in coming:
                (arrival,) = transport.receive(DATA.back)
                assert arrival.micro_batch == what.micro_batch
                transport.delivered(DATA, what.micro_batch)
                transport.delivered(SKIP, what.micro_batch)
                left.append(len(transport._sending))  # type: ignore[attr-defined]
        else:
            for channel in (DATA, SKIP):
                for what in coming:
                    (arrival,) = transport.receive(channel)
                    assert arrival.micro_batch == what.micro_batch
                    for tensor, wanted in zip(arrival.tensors, sample(what.micro_batch, 2), strict=True):
                        torch.testing.assert_close(tensor, wanted)
            for what in coming:
                transport.send(DATA.back, what, sample(what.micro_batch, 2))
        transport.finish()
        return left

    assert between("direct", work)[0] == [2 * (M - 1 - i) for i in range(M)]
