"""Networks of users' own that some engines trained in another way than one device, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.core.problem import ProblemError
from harness.interfaces import OptimizerSpec
from harness.nn.skip import Skippable
from harness.runtime.training_state import initial_layers
from tests.engines import contract
from tests.engines.contract import Case
from tests.engines.networks import Network
from tests.engines.test_several_inputs import ENGINES

SGD = OptimizerSpec("sgd", lr=0.05)


class Queries(Skippable):
    """Gives a view of its weight on, as learned queries that later blocks take, and another one as a skip."""

    stashes = ("late",)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.queries, self.late = nn.Linear(4, 6), nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.stash("late", self.late.expand(len(x), 6))
        return self.linear(x), self.queries.expand(len(x), 6)


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class Late(Skippable):
    pops = ("late",)

    def forward(self, x: Tensor) -> Tensor:
        late: Tensor = self.pop("late")
        return x * late


class Teacher(nn.Module):
    """A student next to a frozen teacher, which stays in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.teacher = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        taught: Tensor = self.student(x) - self.teacher(x)
        return taught


class Spectrum(nn.Module):
    """Multiplies frequencies, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=6)


class Transposed(nn.Linear):
    """Has a weight that is the transposed of one, and not contiguous."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6).t())


class Order(nn.Module):
    """Has whole numbers among its weights, which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.order = nn.Parameter(torch.tensor([5, 3, 1, 0, 2, 4]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        ordered: Tensor = self.linear(x)[:, self.order]
        return ordered


LAYERS: dict[str, list[Callable[[], nn.Module]]] = {
    "queries": [lambda: nn.Linear(4, 4), Queries, Join, Late],
    "teacher": [lambda: nn.Linear(4, 6), nn.Tanh, Teacher, lambda: nn.Linear(6, 6)],
    "transposed": [lambda: nn.Linear(4, 6), Transposed, nn.Tanh, lambda: nn.Linear(6, 6)],
    "order": [lambda: nn.Linear(4, 6), Order, nn.Tanh, lambda: nn.Linear(6, 6)],
    "spectrum": [lambda: nn.Linear(4, 6), Spectrum, nn.Tanh, lambda: nn.Linear(6, 6)],
}


def network(name: str) -> Network:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    inputs, targets = lambda n: torch.randn(n, 4), lambda n: torch.randn(n, 6)
    return Network(name, lambda: [make() for make in LAYERS[name]], inputs, targets, loss)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYERS)
def test_it_trains_like_single(name: str, engine: str) -> None:
    one, plan, dtype = ENGINES[engine]
    case = Case(one, network(name), plan, dtype, optimizer=SGD)
    can = one.capabilities
    taken = {"spectrum": can.complex_weights, "order": can.integer_weights, "transposed": can.strided_weights}
    if taken.get(name, True):
        contract.check_training(case)


@pytest.mark.parametrize("engine", ["gpipe", "ddp"])
@pytest.mark.usefixtures("ranks")
def test_other_layers_than_the_plan_has_are_refused(engine: str) -> None:
    """A profile may be older than sources that its folder does not hold."""
    one, plan, dtype = ENGINES[engine]
    last = plan.stages[-1]
    shorter = replace(plan, stages=(*plan.stages[:-1], replace(last, last=last.last - 1)))
    with pytest.raises(ProblemError, match="has 4 layers, and the profile that was planned with has 3"):
        contract.run(Case(one, network("teacher"), shorter, dtype, optimizer=SGD))


def test_complex_weights_stay_complex() -> None:
    """In the format of the run: 64 bits for each part in float64."""
    case = Case(ENGINES["gpipe"][0], network("spectrum"), ENGINES["gpipe"][1], "float64")
    weights = {weight.dtype for weight in initial_layers(case.model, case.spec).parameters()}
    assert weights == {torch.float64, torch.complex128}
