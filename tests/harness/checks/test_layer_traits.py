"""What an engine cannot do with a model is refused once it is planned, with a fix that takes it away."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checks import layer_traits
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.plan import Mesh, Plan
from harness.core.traits import Given, Traits
from harness.interfaces import Capabilities
from tests.harness.checks.test_request import config
from tests.problems import fixes

RANKS = Capabilities(multi_process=True, data=True)
PLAN = Plan.contiguous([2, 2], micro_batches=2)
WHOLE = Plan.contiguous([4], micro_batches=2)
REPLICAS = replace(WHOLE, mesh=Mesh(data=2))
FLOAT, COMPLEX, INT = Given("float32", True), Given("complex64", True), Given("int64", False)


def profile(at: int = 2, tied: tuple[int, ...] = (), **fields: Any) -> ModelProfile:
    """Four layers, of which layer `at` has traits; `same_memory` and `by_value` are the model's."""
    whole = {name: fields.pop(name) for name in ("same_memory", "by_value") if name in fields}
    layers = [
        LayerProfile(
            f"l{number}",
            param_bytes=8,
            tied=(Tied("l0.weight", 4),) if number in tied else (),
            traits=Traits(**fields) if number == at else Traits(),
        )
        for number in range(4)
    ]
    return ModelProfile(tuple(layers), "net", **whole)


def refused(can: Capabilities, plan: Plan, of: ModelProfile, **keys: Any) -> list[tuple[str, list[str]]]:
    found = layer_traits.refused(config(**keys), can, plan, of)
    return [(problem.message, fixes(problem)) for problem in found]


APART = {
    "a weight of another layer": (RANKS, profile(uses=("l1.weight",))),
    "the same memory": (RANKS, profile(same_memory=(("l1.weight", "l2.weight"),))),
    "in place": (Capabilities(), profile(in_place=1)),
    "complex": (Capabilities(complex=False), profile(1, gives=(COMPLEX,))),
    "complex skip": (
        Capabilities(complex=False),
        replace(profile(), skips=(Skip(1, 3, 8, "s", COMPLEX), Skip(0, 3, 8, "t"))),
    ),
    "a skip that is mixed": (
        Capabilities(mixed=False),
        replace(profile(1, gives=(FLOAT,)), skips=(Skip(1, 2, 8, "s", INT), Skip(0, 1, 8, "t"))),
    ),
    "mixed": (Capabilities(mixed=False), profile(1, gives=(FLOAT, INT))),
}


@pytest.mark.parametrize("name", APART)
def test_layers_that_must_be_in_one_stage(name: str) -> None:
    """The first fix puts them there, another engine has one stage."""
    can, of = APART[name]
    ((message, fixed),) = refused(can, PLAN, of)
    assert "(stages 0 and 1)" in message
    assert fixed[0].startswith("planner=given planner.balance=[") and fixed[1:] == ["engine=single"]
    balance = [int(count) for count in fixed[0].partition("[")[2].rstrip("]").split(",")]
    assert not refused(can, Plan.contiguous(balance, micro_batches=2), of)
    assert not refused(can, WHOLE, of)


def test_of_a_skip_from_frozen_layers_it_is_said_that_they_are_frozen() -> None:
    constant, can = Given("float32", False), Capabilities(mixed=False)
    mixed = replace(profile(1, gives=(FLOAT,)), skips=(Skip(0, 3, 8, "s", constant),))
    frozen = replace(mixed, layers=(replace(mixed.layers[0], frozen_bytes=8), *mixed.layers[1:]))
    ((said, _),), ((trained, _),) = refused(can, PLAN, frozen), refused(can, PLAN, mixed)
    assert said.startswith("takes tensors of float32 and float32") and "what 'l0' gives has none" in said
    assert "are frozen" in said and "frozen" not in trained


@pytest.mark.parametrize(
    ("can", "of"),
    [
        (Capabilities(), profile(uses=("l1.weight",))),
        (Capabilities(), profile(1, gives=(COMPLEX,))),
        (Capabilities(mixed=False), profile(1, gives=(INT, INT))),
        (
            Capabilities(),
            profile(sparse=("l2.weight",), scalars=("l2.scale",), unused=("l2.weight",), complex=("l2.weight",)),
        ),
        (Capabilities(), profile(by_value="in layer 2", same_memory=(("l1.weight", "l2.weight"),))),
        (RANKS, profile(max_norm=True, changes=("l2.weight",))),
    ],
)
def test_what_an_engine_can_do(can: Capabilities, of: ModelProfile) -> None:
    assert not refused(can, PLAN, of)


@pytest.mark.parametrize(
    ("can", "plan", "of", "fixed"),
    [
        (Capabilities(by_value=False), PLAN, profile(by_value="in layer 2"), "engine=gpipe"),
        (Capabilities(by_value=False), WHOLE, profile(by_value="in layer 2"), "engine=single"),
        (Capabilities(sparse=False), REPLICAS, profile(sparse=("l2.weight",)), "engine=ddp"),
        (Capabilities(scalars=False), REPLICAS, profile(scalars=("l2.scale",)), "engine=ddp"),
        (Capabilities(empty=False), REPLICAS, profile(empty=("l2.none",)), "engine=ddp"),
        (Capabilities(complex_weights=False), REPLICAS, profile(complex=("l2.weight",)), "engine=ddp"),
        (Capabilities(strided_weights=False), REPLICAS, profile(strided=("l2.weight",)), "engine=ddp"),
        (Capabilities(integer_weights=False), WHOLE, profile(integers=("l2.weight",)), "engine=single"),
        (Capabilities(), replace(PLAN, recompute="always"), profile(draws=True), "engine.checkpoint=never"),
        (Capabilities(), replace(PLAN, recompute="always"), profile(too_large="'x' of L"), "engine.checkpoint=never"),
        (Capabilities(same_memory=False), REPLICAS, profile(same_memory=(("l1.w", "l2.w"),)), "engine=ddp"),
        (RANKS, REPLICAS, profile(max_norm=True), "engine=single"),
        (Capabilities(), PLAN, profile(0, tied=(0, 3), max_norm=True), "engine=single"),
        (RANKS, REPLICAS, profile(max_norm=True, changes=("l2.w",)), "engine=single"),
        (RANKS, REPLICAS, profile(changes=("l2.w",)), "engine=single"),
        (Capabilities(), PLAN, profile(0, tied=(0, 3), changes=("l0.w",)), "engine=single"),
        (Capabilities(changed_weights=False), WHOLE, profile(changes=("l2.w",)), "engine=single"),
        (Capabilities(), replace(PLAN, recompute="always"), profile(changes=("l2.w",)), "engine.checkpoint=never"),
        (Capabilities(), replace(PLAN, recompute="except_last"), profile(changes=("l2.w",)), "engine.checkpoint=never"),
    ],
)
def test_what_an_engine_cannot_do(can: Capabilities, plan: Plan, of: ModelProfile, fixed: str) -> None:
    ((_, fixes),) = refused(can, plan, of)
    assert fixes[0] == fixed


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_fused_optimizer_takes_dense_gradients_of_real_numbers(kind: str) -> None:
    of = profile(**{kind: ("l2.weight",)})
    ((_, fixes),) = refused(Capabilities(), WHOLE, of, optimizer__fused=True)
    assert fixes == ["optimizer.fused=false"]
    assert not refused(Capabilities(), WHOLE, profile(), optimizer__fused=True)


def test_another_engine_comes_with_its_mesh() -> None:
    """What was typed for this one is taken back."""
    keys = {"mesh__pipeline": 2, "planner": {"name": "given", "balance": [2, 2]}}
    ((_, fixes),) = refused(RANKS, replace(PLAN, mesh=Mesh(2, 2)), profile(max_norm=True), mesh__data=2, **keys)
    assert fixes == ["engine=single mesh.data=1 mesh.pipeline=1 planner=balance"]
