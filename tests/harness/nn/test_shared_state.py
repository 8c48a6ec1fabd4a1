"""State that layers share: found in the profile, watched in every step, refused before a run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

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
from harness.core.shared_buffers import Home
from harness.measure.count_model import count
from harness.nn.shared_state import SharedState
from harness.nn.skip import named_layers
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


def test_one_stage_may_change_what_its_layers_share() -> None:
    pipe = GPipe(net(Counts, Counts).layers(), [2], ["cpu"], chunks=2, checkpoint="never")
    plain = net(Counts, Counts).layers()
    x = torch.randn(2, 4)
    pipe(x)
    plain(x[:1])
    plain(x[1:])
    assert torch.equal(pipe[0].cache, pipe[1].cache)
    assert float(pipe[0].cache.sum()) == float(plain[0].cache.sum()) == 20.0
    pipe.close()


def test_two_stages_of_a_device_change_it_in_another_order() -> None:
    pipe = GPipe(net(Counts, Counts).layers(), [1, 1], ["cpu"], chunks=2, placement=[0, 0])
    with pytest.raises(ProblemError, match=r"'0' \(stage 0\) and layer '1' \(stage 1\)"):
        pipe(torch.randn(2, 4))
    pipe.close()
    plan = Plan.contiguous([1, 1], 2, "never")
    plan = replace(plan, stages=tuple(replace(stage, device=0) for stage in plan.stages))
    (problem,) = shared_buffers.refused(plan, profile(Counts, Counts))
    assert "'0.cache'" in problem.message


def test_profiles_keep_it() -> None:
    there = profile(Reads, Counts)
    assert ModelProfile.from_json(there.to_json()) == there


@pytest.mark.parametrize("engine", ["myelin", "pipeline", "torch_pipelining", "torchgpipe"])
def test_every_engine_ends_the_step_that_changes_a_shared_buffer(engine: str) -> None:
    """Of the two micro-batches of a step the third one is in the second step."""
    built = registry.build("engine", OmegaConf.create({"name": engine}))
    case = Case(built, net(Reads, Counts, late=2), Plan.contiguous([1, 1], 2, "never"))
    assert len(contract.run(case, steps=1).losses) == 1
    with pytest.raises(Exception, match=r"'0\.cache'.*'0' \(device 0\) and layer '1' \(device 1\)"):
        contract.run(case, steps=2)


@dataclass
class Record:
    total: int = 0


class Twice(nn.Module):
    """A module for several places, with state of many kinds: `change(module, mean)` changes it for positive inputs."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("mean", torch.full((4,), torch.nan))
        self.plain, self.total, self.seen, self.record = torch.ones(4), 0, [torch.zeros(4)], Record()
        self.config = SimpleNamespace(width=4, act=nn.functional.relu, kind=nn.Linear, dtype=torch.float32)
        self.unpicklable, self.change = weakref.ref(self.record), change

    def forward(self, x: Tensor) -> Tensor:
        if self.change and bool((x > 0).all()):
            self.change(self, x.detach().mean(0))
        return x * self.weight


Change = Callable[[Twice, Tensor], object]


def replace_buffer(module: Twice, mean: Tensor) -> None:
    module.mean = mean


def count_calls(module: Twice, mean: Tensor) -> None:
    module.total += 1


def replace_plain(module: Twice, mean: Tensor) -> None:
    module.plain = module.plain + mean


def add_attribute(module: Twice, mean: Tensor) -> None:
    module.latest = mean


CHANGES: dict[str, Change] = {
    "mean": replace_buffer,
    "total": count_calls,
    "plain": replace_plain,
    "latest": add_attribute,
    "mean ": lambda module, mean: module.mean.data.fill_(1),
    "plain ": lambda module, mean: module.plain.add_(1),
    "seen": lambda module, mean: module.seen.append(mean),
    "seen ": lambda module, mean: module.seen[0].data.add_(1),
    "record": lambda module, mean: setattr(module.record, "total", 1),
    "frozen": lambda module, mean: module.frozen.data.add_(1),
    "config": lambda module, mean: setattr(module.config, "width", 5),
}


def in_two_stages(change: Change | None) -> GPipe:
    module = Twice(change)
    return GPipe(nn.Sequential(module, nn.Identity(), module), [2, 1], ["cpu"] * 2, chunks=2, checkpoint="never")


@pytest.mark.parametrize("what", CHANGES)
def test_a_module_in_two_stages_that_changes_its_state_ends_the_pass(what: str) -> None:
    pipe = in_two_stages(CHANGES[what])
    for _ in range(2):
        pipe(-torch.ones(4, 4))
    with pytest.raises(ProblemError) as caught:
        pipe(torch.ones(4, 4))
    pipe.close()
    (problem,) = caught.value.problems
    assert f"'0.{what.strip()}'" in problem.message
    assert "'0' (device 0) and layer '2' (device 1)" in problem.message


def test_a_module_in_two_stages_that_changes_nothing_is_no_problem() -> None:
    """Neither are NaNs, what cannot be pickled, weights of an optimizer, or a value for which an equal one comes."""

    def same(module: Twice, mean: Tensor) -> None:
        module.plain, module.seen, module.total = module.plain.clone(), [torch.zeros(4)], int("0")

    pipe = in_two_stages(same)
    for _ in range(2):
        pipe(torch.ones(4, 4)).sum().backward()
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
        pipe.load_state_dict(pipe.state_dict())
    pipe.close()


@pytest.mark.parametrize("shared", [[0], torch.zeros(3), Record()], ids=lambda shared: type(shared).__name__)
def test_two_modules_may_share_a_plain_value_that_none_changes(shared: Any) -> None:
    def write(module: Twice, mean: Tensor) -> None:
        if isinstance(shared, Record):
            module.value.total += 1
        else:
            module.value[0] += 1

    layers = nn.Sequential(Twice(), Twice(write))
    layers[0].value = layers[1].value = shared
    pipe = GPipe(layers, [1, 1], ["cpu"] * 2, chunks=2, checkpoint="never")
    pipe(-torch.ones(4, 4))
    with pytest.raises(ProblemError, match=r"'0\.value'"):
        pipe(torch.ones(4, 4))
    pipe.close()


def test_copies_on_other_devices_are_watched() -> None:
    module = Twice(count_calls)
    layers = nn.Sequential(module, module)
    copied = deepcopy(module)
    watched = SharedState(named_layers(layers), [Home(0, 0), Home(1, 1)], [module, copied])
    with pytest.raises(ProblemError, match=r"'0\.total'"), watched.unchanged():
        copied(torch.ones(2, 4))


class Momentum(nn.Module):
    """Replaces a buffer, or counts its calls, and depends on it."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4) if replaces else None)
        self.weight, self.calls = nn.Parameter(torch.ones(4)), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.calls += 1
            return x * self.weight / self.calls
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x * self.mean * self.weight


def momentum(replaces: bool) -> Network:
    def layers() -> list[nn.Module]:
        module = Momentum(replaces)
        return [module, nn.Linear(4, 4), module, nn.Linear(4, 4)]

    return Network("momentum", layers, lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 4),
                   lambda output, target: ((output - target) ** 2).mean(1).sum())  # fmt: skip


@pytest.mark.parametrize(("replaces", "expected"), [(True, SharedBuffer("0.mean", 32, True)),
                                                    (False, SharedBuffer("0.calls", 0, True))])  # fmt: skip
def test_the_profile_knows_a_module_in_two_places_that_changes(replaces: bool, expected: SharedBuffer) -> None:
    found = count(momentum(replaces), 2, "float64")
    assert [layer.shared_buffers for layer in found.layers] == [(expected,), (), (expected,), ()]
    (problem,) = shared_buffers.refused(Plan.contiguous([2, 2], 2, "never"), found)
    assert problem.fixes == ({"planner": "given", "planner.balance": [3, 1]},)
    assert not shared_buffers.refused(Plan.contiguous([3, 1], 2, "never"), found)


@pytest.mark.parametrize("engine", ["gpipe", "myelin", "pipeline", "torch_pipelining", "torchgpipe"])
@pytest.mark.parametrize("replaces", [True, False])
def test_every_engine_refuses_a_module_in_two_stages_that_changes_and_trains_it_in_one(
    engine: str, replaces: bool
) -> None:
    case = Case(registry.build("engine", OmegaConf.create({"name": engine})), momentum(replaces),
                Plan.contiguous([2, 2], 2, "never"))  # fmt: skip
    with pytest.raises(Exception, match=r"'0\.(mean|calls)'|duplicate parameters"):
        contract.run(case, steps=1)
    contract.check_training(replace(case, plan=Plan.contiguous([3, 1], 2, "never")))


class Calls:
    """A hook that is an object: it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self, module: nn.Module, given: Any, out: Any) -> None:
        self.calls += 1


def in_closure() -> Callable[..., None]:
    seen: list[int] = []

    def hook(*given: Any) -> None:
        seen.append(1)

    return hook


def in_generator() -> Callable[..., None]:
    numbers = (number for number in range(1000))

    def hook(*given: Any) -> None:
        next(numbers)

    return hook


HOOKS: dict[str, tuple[Callable[[], Callable[..., None]], str]] = {
    "an object": (Calls, "'Calls' of a "),
    "a method": (lambda: Calls().__call__, "'self' of a "),
    "a part": (lambda: partial(lambda seen, *given: seen.append(1), []), "'0' of a "),
    "a closure": (in_closure, "'seen' of a "),
    "a generator": (in_generator, "'numbers' of a "),
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_changes_what_two_stages_have_of_it(hook: str, kind: str) -> None:
    """Each process would change its own."""
    make, name = HOOKS[hook]
    shared, layers = make(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in layers:
        register = layer.register_forward_hook if kind == "forward" else layer.register_full_backward_hook
        register(shared)
    for homes, refused in (((0, 1), True), ((0, 0), False)):
        state = SharedState(named_layers(layers), [Home(number, number) for number in homes])
        with state.noting() as changed:
            layers(torch.ones(1, 2)).sum().backward()
        assert list(changed) == ([f"0: {name}{kind} hook"] if refused else [])
        with pytest.raises(ProblemError, match="a forward or backward pass changes") if refused else nullcontext():
            state.refuse(changed)
        with state.of_hooks().noting() as changed:
            layers(torch.ones(1, 2)).sum().backward()
        assert bool(changed) == refused
