"""Buffers that layers share: found in the profile, moved together, watched in every step, refused before a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.config import registry
from harness.core import shared_buffers
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile, SharedBuffer
from harness.core.plan import Plan
from harness.core.problem import ProblemError
from harness.measure.count_model import count
from harness.nn.tied import SharedBuffers, moved
from tests.engines import contract
from tests.engines.contract import Case
from tests.engines.networks import Network


class Reads(nn.Module):
    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.register_buffer("cache", cache)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.cache


class Counts(Reads):
    """Writes from its call number `late` on."""

    def __init__(self, cache: Tensor, late: int = 0) -> None:
        super().__init__(cache)
        self.late, self.calls = late, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.late:
            self.cache.add_(1)
        return super().forward(x)


class Statistics(Reads):
    """Changes the cache in a kernel that torch's versions do not count."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.cache, torch.ones(4), training=True) if self.cache.any() else x


class Replaces(Reads):
    """Gets a buffer of its own in the first pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.cache + 1
        return super().forward(x)


def net(*kinds: type[Reads], late: int = 0) -> Network:
    def layers() -> list[nn.Module]:
        cache = torch.ones(4)
        return [kind(cache, late) if kind is Counts else kind(cache) for kind in kinds]

    return Network("net", layers, lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4),
                   lambda output, target: ((output - target) ** 2).mean(1).sum())  # fmt: skip


def profile(*kinds: type[Reads]) -> ModelProfile:
    return count(net(*kinds), 2, "float64")


@pytest.mark.parametrize(("kind", "written"), [(Reads, False), (Counts, True), (Replaces, False)])
def test_the_profile_says_which_shared_buffers_a_forward_pass_changes(kind: type[Reads], written: bool) -> None:
    layers = profile(Reads, kind, Reads).layers
    assert [layer.shared_buffers for layer in layers] == [(SharedBuffer("0.cache", 32, written),)] * 3


def test_running_statistics_count_as_changed() -> None:
    def layers() -> list[nn.Module]:
        norm = nn.BatchNorm1d(4)
        return [norm, nn.Linear(4, 4), norm]

    model = Network("net", layers, lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4),
                    lambda output, target: ((output - target) ** 2).mean(1).sum())  # fmt: skip
    found = count(model, 2, "float32").layers
    assert all(buffer.written for buffer in found[0].shared_buffers) and len(found[0].shared_buffers) == 3


def test_a_shared_buffer_counts_once_for_each_device() -> None:
    three = profile(Reads, Reads, Reads)
    assert [layer.buffer_bytes for layer in three.layers] == [32, 32, 32]
    assert three.buffer_bytes_of([0, 2]) == 32
    assert MemoryModel().state_parts(three, [0, 1, 2])["buffers"] == 32


def test_a_plan_that_shares_a_changed_buffer_over_devices_is_refused_with_one_that_does_not() -> None:
    both = profile(Counts, Counts, Reads, Reads)
    separate = replace(both.layers[2], shared_buffers=())
    model = replace(both, layers=(*both.layers[:2], separate, replace(separate, name="3")))
    plan = Plan.contiguous([1, 3], 2, "never")
    (problem,) = shared_buffers.refused(plan, model)
    assert problem.key == "model" and "'0.cache'" in problem.message
    assert problem.fixes == ({"planner": "given", "planner.balance": [2, 2]},)
    assert not shared_buffers.refused(Plan.contiguous([2, 2], 2, "never"), model)
    assert not shared_buffers.refused(plan, profile(Reads, Reads, Reads, Reads))
    (problem,) = shared_buffers.refused(Plan.contiguous([1, 1, 1, 1], 2, "never"), model)
    assert problem.fixes == ({"planner": "given", "planner.balance": [2, 1, 1], "mesh.pipeline": 3},)
    (problem,) = shared_buffers.refused(plan, both)
    assert problem.fixes == () and "4" not in problem.message and "1 more" in problem.message


@pytest.mark.parametrize("to", [torch.float64, torch.device("meta")])
def test_moved_layers_share_their_buffers_as_before(to: torch.dtype | torch.device) -> None:
    layers = moved(nn.Sequential(*net(Reads, Reads)._layers()), to)
    assert layers[0].cache is layers[1].cache
    assert to in (layers[0].cache.dtype, layers[0].cache.device)


@pytest.mark.parametrize("kind", [Counts, Statistics])
@pytest.mark.parametrize("first", [True, False])
def test_a_change_of_a_shared_buffer_ends_the_pass(kind: type[Reads], first: bool) -> None:
    pair = (kind, Reads) if first else (Reads, kind)
    pipe = GPipe(net(*pair).layers(), [1, 1], ["cpu", "cpu"], chunks=2)
    with pytest.raises(ProblemError, match=r"'0\.cache'"):
        pipe(torch.randn(4, 4))
    pipe.close()


def test_a_late_change_is_seen() -> None:
    pipe = GPipe(net(Reads, Counts, late=4).layers(), [1, 1], ["cpu", "cpu"], chunks=2, checkpoint="never")
    pipe(torch.randn(4, 4))
    pipe(torch.randn(4, 4))
    with pytest.raises(ProblemError, match=r"'0\.cache'"):
        pipe(torch.randn(4, 4))
    pipe.close()


def test_a_loaded_state_and_a_buffer_of_its_own_are_no_change() -> None:
    pipe = GPipe(net(Reads, Replaces).layers(), [1, 1], ["cpu", "cpu"], chunks=2, checkpoint="never")
    for _ in range(2):
        pipe(torch.randn(4, 4)).sum().backward()
        pipe.load_state_dict(pipe.state_dict())
    pipe.close()


def test_one_device_may_change_what_its_layers_share() -> None:
    watched = SharedBuffers((str(number), layer, 0) for number, layer in enumerate(net(Counts, Counts).layers()))
    with watched.unchanged():
        pass
    pipe = GPipe(net(Counts, Counts).layers(), [1, 1], ["cpu"], chunks=2, placement=[0, 0], checkpoint="never")
    plain = net(Counts, Counts).layers()
    x = torch.randn(2, 4)
    pipe(x)
    plain(x[:1])
    plain(x[1:])
    assert torch.equal(pipe[0].cache, pipe[1].cache)
    assert float(pipe[0].cache.sum()) == float(plain[0].cache.sum()) == 20.0
    pipe.close()


def test_profiles_keep_it() -> None:
    there = profile(Reads, Counts)
    assert ModelProfile.from_json(there.to_json()) == there


@pytest.mark.parametrize("engine", ["myelin", "torch_pipelining", "torchgpipe"])
def test_every_engine_ends_the_step_that_changes_a_shared_buffer(engine: str) -> None:
    """Of the two micro-batches of a step the third one is in the second step."""
    built = registry.build("engine", OmegaConf.create({"name": engine}))
    case = Case(built, net(Reads, Counts, late=2), Plan.contiguous([1, 1], 2, "never"))
    assert len(contract.run(case, steps=1).losses) == 1
    with pytest.raises(Exception, match=r"'0\.cache'.*'0' \(device 0\) and layer '1' \(device 1\)"):
        contract.run(case, steps=2)
