"""The graph of tensors that drives CUDA devices, checked on the CPU, where its streams do nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.core.op import Op
from harness.nn import dropout
from harness.nn.skip import Skippable
from harness.runtime.values import Value
from harness.schedule.builders.gpipe import recomputed
from tests.engines import networks
from tests.engines.networks import Network
from tests.support.gpipe_drivers import run_tensors


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("dependency", [True, False])
@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("network", networks.ALL.values(), ids=networks.ALL.keys())
def test_gradients_equal_those_of_the_token_graph(network: Network, mode: str, portals: bool, dependency: bool) -> None:
    torch.manual_seed(0)
    layers = network.layers().double()
    dropout.number(layers)
    batch = network.sample(6)
    inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
    targets = batch.targets.double() if batch.targets.is_floating_point() else batch.targets
    balance = [len(layers) - 2 * (len(layers) // 3)] + [len(layers) // 3] * 2
    tokens, tensors = (
        GPipe(copy.deepcopy(layers), balance, ["cpu"] * 3, 3, mode, portals=portals) for _ in range(2)
    )  # fmt: skip
    network.loss(tokens(inputs), targets).backward()
    run, output = run_tensors(tensors, inputs, 3, mode, dependency, portals)
    network.loss(output, targets).backward()
    for mine, theirs in zip(gradients(tensors), gradients(tokens), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for name, value in tokens.state_dict().items():
        torch.testing.assert_close(tensors.state_dict()[name], value)
    assert run.bytes_sent == tokens.bytes_sent
    ran = [op for op, *_ in run.recorder.marks]
    assert sum(op.kind == "R" for op in ran) == 3 * sum(recomputed(i, 3, mode) for i in range(3))


@pytest.mark.parametrize("pair", [False, True])
def test_gradients_of_shared_parameters_are_summed_once(pair: bool) -> None:
    """With the losses of two passes in one backward pass, or a loss that depends on the second output alone."""
    linear = nn.Linear(4, 4)
    layers: list[nn.Module] = [linear, nn.Tanh(), linear, networks.Split()] if pair else [linear, nn.Tanh(), linear]
    plain = nn.Sequential(*layers).double()
    pipe = GPipe(copy.deepcopy(plain), [1, len(layers) - 1], ["cpu"] * 2, 2)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]

    def total(outputs: list[Value]) -> Tensor:
        return sum(((out[1] if isinstance(out, tuple) else out) ** 2).sum() for out in outputs)  # type: ignore[return-value]

    total([plain(x) for x in inputs]).backward()
    total([run_tensors(pipe, x, 2, "except_last")[1] for x in inputs]).backward()
    assert len(pipe.shared) == 2
    for copy_of in pipe.shared[0].copies:
        torch.testing.assert_close(copy_of.grad, linear.weight.grad)


def test_plain_dropout_is_exact_under_recomputation() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5)).double()
    found = []
    for mode in ("never", "always"):
        pipe = GPipe(copy.deepcopy(layers), [2, 2], ["cpu"] * 2, 2)
        torch.manual_seed(1)
        run_tensors(pipe, torch.ones(4, 8, dtype=torch.float64), 2, mode)[1].sum().backward()  # type: ignore[union-attr]
        found.append(gradients(pipe))
    for without, recomputed_ in zip(*found, strict=True):
        torch.testing.assert_close(without, recomputed_, rtol=0, atol=0)


def test_recomputation_comes_right_before_its_backward() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], ["cpu"] * 2, 2)
    run, output = run_tensors(pipe, torch.ones(2, 2), 2, "always")
    output.sum().backward()  # type: ignore[union-attr]
    ran = [str(op) for op, *_ in run.recorder.marks if op.stage == 1 and op.kind in ("R", "B")]
    assert ran == ["1R1", "1B1", "1R0", "1B0"]


@pytest.mark.gpu
def test_on_cuda_devices() -> None:
    """One GPU twice as two stages: streams, events and gradients on a real device."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(32, 64)
    plain = copy.deepcopy(layers).cuda()
    plain(x.cuda()).sum().backward()
    for streams in (True, False):
        pipe = GPipe(copy.deepcopy(layers), [2, 2], ["cuda:0", "cuda:0"], 4, "except_last", streams=streams)
        output = pipe(x.cuda())
        assert isinstance(output, Tensor)
        output.sum().backward()
        torch.cuda.synchronize()
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        spans = pipe.recorder.spans()
        assert {Op.parse(s.op).kind for s in spans} == {"F", "R", "B", "copy"}
        assert all(s.end_s >= s.start_s for s in spans)


class Integers(Skippable):
    """Passes integers on, and what has a gradient as a skip."""

    stashes = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.stash("x", self.linear(x))
        return torch.ones(len(x), dtype=torch.int64)


class Popped(Skippable):
    pops = ("x",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, numbers: Tensor) -> Any:
        return self.linear(self.pop("x")) + numbers[:, None]


@pytest.mark.parametrize("dependency", [True, False])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_integers_between_stages_lose_no_gradient(chunks: int, mode: str, dependency: bool) -> None:
    """Of no micro-batch: the graph of a task whose value has no gradient goes on by its skips."""
    layers = nn.Sequential(Integers(), Popped())
    plain = copy.deepcopy(layers)
    x = torch.randn(6, 3, dtype=torch.float64)
    plain(x).pow(2).sum().backward()
    pipe = GPipe(layers, [1, 1], ["cpu"] * 2, chunks, mode, dependency=dependency)
    run_tensors(pipe, x, chunks, mode, dependency)[1].pow(2).sum().backward()
    for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
