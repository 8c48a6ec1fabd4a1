"""Checkpoints of activations inside a stage: the same training, and less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.myelin.checkpointed_stage import SegmentedStage
from harness.interfaces import Session
from harness.nn import dropout
from harness.nn.skip import layer_skips, named_layers
from tests.engines import contract, networks
from tests.engines.myelin.cases import case
from tests.engines.networks import Network
from tests.support.sessions import run_session

EVERY = [
    ("skips", "1"), ("skips", "3"), ("pairs", "auto"), ("norms", "2"), ("shared", "3"), ("tied", "auto"), ("unet", "2"),
    ("gpt with dropout, untied", "auto"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "every"), EVERY)
def test_trains_like_single(model: str, every: str) -> None:
    contract.check_training(replace(case(model, m=2, checkpoint_every=every), samples=4))


def test_an_error_while_a_segment_is_recomputed_says_where() -> None:
    class Fails(nn.Module):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            Fails.passes += 1
            if Fails.passes == 3:  # forward, forward, and the first one again
                raise ZeroDivisionError("on purpose")
            return torch.tanh(x)

    pairs = networks.pairs()

    def layers() -> list[nn.Module]:
        return [nn.Linear(4, 4), Fails(), nn.Linear(4, 4), nn.Linear(4, 2)]

    network = Network("fails", layers, pairs._inputs, pairs._targets, pairs._loss)
    one = case(network, 2, m=2, checkpoint_every="2")
    with pytest.raises(ZeroDivisionError) as caught:
        run_session(one.engine, one.model, one.plan, one.spec, lambda session: session.step(one.model.sample(8)).loss)
    assert "in rank 0, stage 0, in the backward pass of micro-batch 0" in caught.value.__notes__


def test_only_inputs_of_segments_stay() -> None:
    """Eight layers save their outputs; two segments have their inputs."""
    width, samples = 64, 32
    layers = nn.Sequential(*(module for _ in range(8) for module in (nn.Tanh(), nn.Linear(width, width))))
    saved: list[int] = []

    def kept(segments: list[tuple[int, int]]) -> int:
        stage = SegmentedStage(0, named_layers(layers), 0, [], segments)
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            if tensor.shape == (samples, width):
                seen.add(tensor.data_ptr())
            return tensor

        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = stage(torch.randn(samples, width, requires_grad=True))
        out.sum().backward()
        return len(seen)

    assert kept([]) == 8
    assert kept([(0, 7), (8, 15)]) == 2


def test_other_random_numbers_are_drawn_again() -> None:
    """Those of layers that draw from torch's own generator."""
    masks: list[Tensor] = []

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            masks.append(functional.dropout(torch.ones(100), 0.5))
            return torch.tanh(x) * masks[-1][:1]

    layers = nn.Sequential(Drops(), nn.Linear(3, 3))
    dropout.number(layers)
    stage = SegmentedStage(0, named_layers(layers), 0, layer_skips(named_layers(layers)), [(0, 0)])
    stage(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)


def test_memory_falls() -> None:
    """Measured, on a stage whose activations are most of it."""

    def layers() -> list[nn.Module]:
        return [module for _ in range(6) for module in (nn.Linear(16, 16), nn.Tanh(), nn.Tanh(), nn.Tanh())]

    network = Network("deep", layers, lambda n: torch.randn(n, 16), lambda n: torch.randn(n, 16), networks._squares)

    def peak(every: str) -> int:
        one = replace(case(network, 1, m=2, checkpoint_every=every), samples=4096)

        def work(session: Session) -> int:
            found = session.step(one.model.sample(one.samples), meter=True).peak_memory_bytes
            assert found
            return found[0]

        return run_session(one.engine, one.model, one.plan, one.spec, work)

    assert peak("4") < 0.6 * peak("never")


class Energy(nn.Module):
    """A step down the gradient of an energy, which it takes inside of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(y).tanh().sum(), y, create_graph=True)
        return x - 0.1 * slope


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class InPlaceOnFirst(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].mul_(2) * pair[1]


@pytest.mark.parametrize("inside", [[Energy], [Twice, InPlaceOnFirst]])
def test_layers_in_segments_of_one_have_the_gradients_of_the_layers_alone(inside: list[type[nn.Module]]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), *(kind() for kind in inside), nn.Linear(4, 4)).double()
    stage = SegmentedStage(0, named_layers(layers), 0, [], [(k, k) for k in range(len(layers))])
    x, found = torch.randn(3, 4, dtype=torch.float64), []
    for run in (layers, stage):
        layers.zero_grad()
        run(x.clone().requires_grad_()).sin().sum().backward()
        found.append([parameter.grad for parameter in layers.parameters()])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.detach()


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Detached, RuntimeError, "layer '2' works in place on one of two"),
        (Named, TypeError, "layer '1' must be"),
    ],
)
def test_what_cannot_go_from_segment_to_segment(kind: type[nn.Module], error: type[Exception], message: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), kind(), InPlaceOnFirst())
    stage = SegmentedStage(0, named_layers(layers), 0, [], [(k, k) for k in range(3)])
    with pytest.raises(error, match=message):
        stage(torch.ones(2, 4, requires_grad=True))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_whatever_a_layer_raises_says_where(error: type[BaseException]) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    pairs = networks.pairs()
    network = Network("raises", lambda: [nn.Linear(4, 4), Raises()], pairs._inputs, pairs._targets, pairs._loss)
    one = case(network, 1, m=2)
    with pytest.raises(error) as caught:
        run_session(one.engine, one.model, one.plan, one.spec, lambda session: session.step(one.model.sample(8)).loss)
    notes = caught.value.__notes__
    assert "in stage 0, layer '1', micro-batch 0" in notes
    assert any(note.startswith("in rank 0, stage 0") for note in notes)
