"""What the queues of a pattern say to CUDA's allocator, and in which streams they run, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engines.periodic.device_queues import DeviceQueues
from engines.periodic.session import PeriodicSession
from engines.periodic.step import Step
from harness.interfaces import SessionSpec
from tests.engines.test_periodic import case
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Sessions on CPU devices have queues with the streams of GPUs."""
    cuda = fake_cuda.install(monkeypatch)
    plain = DeviceQueues.__init__

    def on_gpus(queues: DeviceQueues, plan: Any, devices: tuple[str, ...]) -> None:
        plain(queues, plan, tuple(f"cuda:{number}" for number in range(len(devices))))

    monkeypatch.setattr(DeviceQueues, "__init__", on_gpus)
    return cuda


def stepped(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceQueues, list[tuple[str, int, int]]]:
    """The queues of two stages, and what each message was: ("sent" or "arrived", device, tensor)."""
    messages: list[tuple[str, int, int]] = []
    plain, kept = Step._copied, []

    def noted(step: Step, tensors: tuple[Tensor | None, ...], source: int, target: int) -> tuple[Tensor | None, ...]:
        copied = plain(step, tensors, source, target)
        kept.extend([*tensors, *copied])
        messages.extend(("sent", source, id(one)) for one in tensors)
        messages.extend(("arrived", target, id(one)) for one in copied)
        return copied

    monkeypatch.setattr(Step, "_copied", noted)
    one = case("pairs", 2, 4)
    with one.engine.session(one.model, one.plan, SessionSpec(("cpu", "cpu"))) as session:
        assert isinstance(session, PeriodicSession)
        session.step(one.model.sample(8))
        return session.queues, messages


def test_memory_of_messages_stays_until_both_ends_have_used_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's thread asks for the next message's memory while the device still reads the last one."""
    queues, messages = stepped(cuda, monkeypatch)
    assert len(messages) >= 2 * 2 * 4
    for end, device, tensor in messages:
        leaving = queues.streams[queues.links[device, 1 - device]][0]
        stream = leaving if end == "sent" else queues.streams[queues.compute[device]][0]
        assert ("keep", tensor, stream) in cuda.log, (end, device)


def test_a_link_copies_in_streams_of_its_own_on_both_devices(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the default one of the source, which waits for nothing that is in others."""
    queues, _ = stepped(cuda, monkeypatch)
    for (source, target), link in queues.links.items():
        streams = queues.streams[link]
        assert [stream.device for stream in streams] == [torch.device("cuda", n) for n in (source, target)]
        for stream in streams:
            assert ("on", stream) in cuda.log and ("sleep", stream) in cuda.log
