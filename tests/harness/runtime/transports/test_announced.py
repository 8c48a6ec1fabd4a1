"""Messages as they go between GPUs, each after a word that it comes now; here by gloo alone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.runtime.transports import torch_transport
from harness.runtime.transports.torch_transport import GroupTransport, TorchTransport
from harness.runtime.transports.transport import Coming, Position, Transport
from tests.harness.runtime.transports.test_transport import CHANNELS, DATA, M, between, received, sample
from tests.support import fake_cuda

pytestmark = pytest.mark.usefixtures("ranks")

COMING = [Coming(i, 2) for i in range(M)]
KINDS = ("torch", "direct")


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupTransport, "_announces", True)


def begin(transport: Transport) -> bool:
    """Whether this is the sender of a step in which everything goes one way."""
    transport.begin({channel: COMING if channel == DATA else [] for channel in transport.into})
    return transport.position.device == 0


def arrivals(kind: str, transport: Transport) -> dict[Any, list[torch.Tensor]]:
    if kind == "torch":
        return received(transport, M)
    return {(one.channel, one.micro_batch): one.tensors for _ in COMING for one in transport.receive(DATA)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_comes(kind: str, announced: None) -> None:
    def work(transport: Transport) -> int:
        if begin(transport):
            for what in COMING:
                transport.send(DATA, what, sample(what.micro_batch, 2))
        else:
            found = arrivals(kind, transport)
            for i in range(M):
                for tensor, wanted in zip(found[DATA, i], sample(i, 2), strict=True):
                    torch.testing.assert_close(tensor, wanted)
        transport.finish()
        return 1

    assert between(kind, work) == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_received_before_it_is_there(kind: str, announced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would be a kernel which does nothing but wait."""
    posted: list[int] = []
    for name in ("recv", "irecv"):
        plain = getattr(dist, name)

        def noted(tensor: Any, peer: int, group: Any = None, tag: int = 0, plain: Any = plain) -> Any:
            posted.append(tensor.numel())
            return plain(tensor, peer, group, tag)

        monkeypatch.setattr(dist, name, noted)

    def work(transport: Transport) -> list[int]:
        posted.clear()
        sends = begin(transport)
        time.sleep(0.2)
        early = list(posted)
        dist.barrier()
        if sends:
            for what in COMING:
                transport.send(DATA, what, [torch.zeros(2, 7)])
        else:
            arrivals(kind, transport)
        transport.finish()
        return early

    words = 1 if kind == "torch" else 0
    assert between(kind, work)[1] == [1] * words


def on_gpu() -> TorchTransport:
    """A transport of the second stage that has not met the first one."""
    transport = TorchTransport.__new__(TorchTransport)
    transport.device, transport.position, transport._groups = torch.device("cuda:0"), Position(1, 1, (0, 1), 1), {}
    transport.numbers, transport.micro_batches = {channel: n for n, channel in enumerate(CHANNELS)}, M
    return transport


def test_another_message_than_the_expected_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes what comes next for it, whatever it is."""
    monkeypatch.setattr(dist, "recv", lambda word, *where: word.fill_(3))
    transport = on_gpu()
    transport._hear(DATA, 3)
    with pytest.raises(RuntimeError, match="1copy2<0 is expected, and 1copy3<0 comes"):
        transport._hear(DATA, 2)


def test_words_have_tags_of_their_own() -> None:
    transport = on_gpu()
    tags = [transport.tag(channel, i) for channel in CHANNELS for i in range(M)]
    assert len({*tags, *map(transport._word_tag, CHANNELS)}) == len(CHANNELS) * (M + 1)


def test_a_thread_sleeps_until_a_gpu_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda.install(monkeypatch)
    on_gpu()._synchronize()
    assert [entry[0] for entry in cuda.log] == ["mark", "sleep"]


def test_a_channel_takes_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits as long as all else, without which torch warns."""
    opened: list[Any] = []
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **keys: opened.append((ranks, keys)))
    on_gpu()._opened(CHANNELS[:2])
    assert [ranks for ranks, _ in opened] == [[0, 1], [0, 1]]
    for _, keys in opened:
        assert keys["pg_options"].config.max_ctas == torch_transport.CTAS < 32
        assert keys["pg_options"]._timeout == keys["timeout"]
    transport = on_gpu()
    transport.device = torch.device("cpu")
    transport._opened(CHANNELS[:1])
    assert opened[-1][1]["pg_options"] is None
