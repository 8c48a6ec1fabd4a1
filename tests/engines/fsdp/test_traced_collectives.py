"""How long the layers wait for gathered weights on a GPU, without one."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from engines.fsdp import traced_collectives
from engines.fsdp.traced_collectives import TracedAllGather, TracedReduceScatter, time_waits
from harness.runtime.collectives import CollectiveCounter
from harness.runtime.device_clock import DeviceClock
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda


class Group:
    """As torch's, with a gather under way; what comes in it takes the fake GPU some seconds."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        event = SimpleNamespace(stream="gather")
        self._all_gather_result: Any = SimpleNamespace(all_gather_event=event)

    def wait_for_unshard(self) -> None:
        self.cuda.time_s += 100.0  # copies weights to their places: that is no waiting
        self._all_gather_result = None

    def finalize_backward(self) -> None:
        self.cuda.time_s += 7.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = fake_cuda.install(monkeypatch)
    plain = fake_cuda.FakeStream.wait_event

    def waits(stream: fake_cuda.FakeStream, event: Any) -> None:
        cuda.time_s += 3.0
        plain(stream, event)

    monkeypatch.setattr(fake_cuda.FakeStream, "wait_event", waits)
    return cuda


def test_layers_wait_for_weights_and_for_sums(cuda: FakeCuda) -> None:
    clock, group = DeviceClock(torch.device("cuda:0")), Group(cuda)
    counter = CollectiveCounter(clock.now)
    time_waits(group, counter)
    clock.synchronize()
    group.wait_for_unshard()
    group.wait_for_unshard()  # nothing is under way: there is nothing to wait for
    group.finalize_backward()
    held, _ = counter.take()
    assert {name: clock.total_s(found) for name, found in held.items()} == {"all_gather": 3.0, "reduce_scatter": 7.0}


@pytest.mark.parametrize(("device", "times"), [("cpu", 1), ("meta", 0)])
def test_on_a_gpu_a_call_holds_up_nobody(device: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns before the collective begins, which is in a stream of its own."""
    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(traced_collectives, name, lambda *tensors, **keys: None)
    counter = CollectiveCounter(DeviceClock(torch.device("cpu")).now)
    whole, part = torch.ones(4, device=device), torch.ones(2, device=device)
    TracedAllGather(counter)(whole, part, None)  # type: ignore[arg-type]
    TracedReduceScatter(counter, lambda: None)(part, whole, None, None)  # type: ignore[arg-type]
    held, sizes = counter.take()
    assert {name: len(held[name]) for name in sizes} == {"all_gather": times, "reduce_scatter": times}
    assert sizes == {"all_gather": whole.nbytes, "reduce_scatter": whole.nbytes}


def test_torch_has_what_is_timed() -> None:
    """The names are torch's own ones, which may change."""
    assert "all_gather_event" in AllGatherResult._fields
    assert "self._all_gather_result" in inspect.getsource(FSDPParamGroup.wait_for_unshard)
    assert "wait_event" in inspect.getsource(FSDPParamGroup.finalize_backward)
    assert callable(FSDPModule._get_fsdp_state), "by which `sharded_stage` reaches what is timed: nothing public does"
    assert isinstance(FSDPState()._fsdp_param_groups, list)
    assert {"_backward_hooks", "_post_accumulate_grad_hooks"} <= set(dir(torch.nn.Parameter())), "for `refuse_hooks`"
