"""Half precision: float32 weights after the parameters, the scale of the loss, and the bytes of all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from harness.core.problem import Problem
from harness.interfaces import OptimizerSpec, Session
from harness.runtime.loss_scale import LEAST, PATIENCE, START, LossScale, overflows
from harness.runtime.memory_meter import Meter
from harness.runtime.training_state import copies
from tests.engines.myelin.cases import case
from tests.engines.myelin.updating import (
    ADAMW,
    ELEMENTS,
    OPTIMIZERS,
    Gradients,
    Stepper,
    assert_same,
    gradients,
    parameters,
)
from tests.problems import row
from tests.support.sessions import run_session

HALF = ["float16", "bfloat16"]
LARGEST = 65504.0


def scaled(wanted: Gradients, scale: float) -> Gradients:
    return {name: None if value is None else value * scale for name, value in wanted.items()}


def masters(
    optimizer: OptimizerSpec, dtype: str, steps: list[Gradients], scale: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Float32 weights, stepped by torch with what is left in half precision of the gradients."""
    named = {name: nn.Parameter(p.detach().float()) for name, p in parameters(dtype).items()}
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    momentum = {"momentum": optimizer.momentum} if optimizer.name == "sgd" else {}
    own = kinds[optimizer.name](named.values(), lr=optimizer.lr, weight_decay=optimizer.weight_decay, **momentum)
    for step in steps:
        for name, value in step.items():
            named[name].grad = value.float() / scale
        own.step()
    weights = {name: p.detach() for name, p in named.items()}
    return weights, {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: f"{one.name} {one.momentum} {one.weight_decay}")
@pytest.mark.parametrize(("offload", "bsize", "k"), [(False, 16, 1), (True, 13, 2), (True, 1000, 0)])
def test_float32_weights_are_updated(dtype: str, optimizer: OptimizerSpec, offload: bool, bsize: int, k: int) -> None:
    stepper = Stepper(parameters(dtype), optimizer, dtype, offload=offload, bsize=bsize, k=k, loss_scale=3.0)
    assert stepper.updates.scale == (3.0 if dtype == "float16" else 1.0)
    steps = [scaled(gradients(n, dtype), stepper.updates.scale) for n in range(4)]
    for step in steps:
        stepper.step(step)
    weights, rounded = masters(optimizer, dtype, steps, stepper.updates.scale)
    assert_same(stepper.updates.weights(), weights)
    assert_same({name: p.detach() for name, p in stepper.named.items()}, rounded)
    assert all(row.dtype == torch.float32 for state in stepper.updates.state().values() for row in state.values())


@pytest.mark.parametrize("dtype", HALF)
def test_what_half_precision_forgets_is_kept(dtype: str) -> None:
    """Updates too small for the parameters add up."""
    named = {"one": nn.Parameter(torch.ones(1, dtype=getattr(torch, dtype)))}
    stepper = Stepper(named, OptimizerSpec("sgd", lr=1e-4), dtype, loss_scale=1.0)
    for _ in range(100):
        stepper.step({"one": torch.ones(1, dtype=getattr(torch, dtype))})
    assert float(named["one"].detach()) == pytest.approx(0.99, abs=0.004)
    assert float(stepper.updates.weights()["one"]) == pytest.approx(0.99, abs=1e-5)


@pytest.mark.parametrize("offload", [False, True])
def test_a_state_in_half_precision_moves(offload: bool) -> None:
    first, second = (
        Stepper(parameters("float16"), ADAMW, "float16", offload=o, bsize=9) for o in (offload, not offload)
    )
    first.step(gradients(0, "float16"))
    second.updates.load(first.updates.weights(), first.updates.state())
    for stepper in (first, second):
        stepper.step(gradients(1, "float16"))
    assert_same(second.updates.weights(), first.updates.weights())
    assert_same(second.updates.state(), first.updates.state())
    assert torch.equal(second.named["last"], first.named["last"])


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "kept"), [(ADAMW, 8), (OPTIMIZERS[1], 4), (OPTIMIZERS[0], 0)])
@pytest.mark.parametrize("dtype", HALF)
def test_bytes_of_the_model_state(dtype: str, optimizer: OptimizerSpec, kept: int) -> None:
    """20 bytes a parameter with Adam; offloaded 4, and 16 for each parameter of a bucket (Myelin, section V-B)."""

    def device_bytes(**config: object) -> int:
        return bytes_after_a_step(dtype, optimizer, 4 + kept, **config)

    assert device_bytes() == (12 + kept) * ELEMENTS
    for bsize in (1, 2, 15, ELEMENTS):
        assert device_bytes(offload=True, bsize=bsize) == 4 * ELEMENTS + (8 + kept) * bsize
    assert device_bytes(offload=True) == (12 + kept) * ELEMENTS, "no bucket is larger than the stage"


def test_bytes_in_float32() -> None:
    assert bytes_after_a_step("float32", ADAMW, 12) == 16 * ELEMENTS
    assert bytes_after_a_step("float32", ADAMW, 12, offload=True, bsize=10) == 8 * ELEMENTS + 160


def bytes_after_a_step(dtype: str, optimizer: OptimizerSpec, host: int, offload: bool = False, **config: object) -> int:
    """What the updates have allocated and still hold, which is what they say they do; of each parameter so many bytes
    lie on the `host` when they are offloaded, which here is the same memory."""
    named, wanted, meter = parameters(dtype), gradients(0, dtype), Meter()
    with meter:
        stepper = Stepper(named, optimizer, dtype, offload=offload, **config)
        stepper.step(wanted)
    device = meter.live_bytes - (host * ELEMENTS if offload else 0)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in stepper.updates.held()}
    assert sum(storage.nbytes() for storage in storages.values()) == device
    return device


# -- the scale of the loss ---------------------------------------------------------------------------------------------


def test_the_scale_falls_by_half_and_doubles_after_many_good_steps() -> None:
    scale = LossScale()
    assert scale.value == START == 2**16
    for _ in range(PATIENCE - 1):
        scale.judge(False)
    scale.judge(True)
    assert (scale.value, scale.skipped) == (START / 2, 1)
    for _ in range(PATIENCE - 1):
        scale.judge(False)
    assert scale.value == START / 2, "counted from the overflow on"
    scale.judge(False)
    assert scale.value == START
    for _ in range(PATIENCE):
        scale.judge(False)
    assert scale.value == 2 * START


def test_a_fixed_scale_stays(capfd: pytest.CaptureFixture[str]) -> None:
    scale = LossScale(8.0)
    for overflow in [True] * 20 + [False] * PATIENCE:
        scale.judge(overflow)
    assert (scale.value, scale.skipped) == (8.0, 20)
    stepper, bad = Stepper(parameters("float16"), ADAMW, "float16", loss_scale=8.0), gradients(1, "float16")
    bad["last"][1, 2] = float("inf")
    stepper.step(bad)
    assert stepper.updates.scale == 8.0
    assert "at a loss scale of 8 (it is fixed): no update on any rank" in capfd.readouterr().out


def test_a_scale_goes_on_where_a_state_has_it() -> None:
    first, second, fixed = LossScale(), LossScale(), LossScale(8.0)
    for overflow in [True, True, *[False] * (PATIENCE - 1)]:
        first.judge(overflow)
    for other in (second, fixed):
        other.load(first.state())
    for scale in (first, second, fixed):
        scale.judge(False)
    assert (first.value, second.value, fixed.value) == (START / 2, START / 2, 8.0)
    second.load(None)
    assert second.state() == LossScale().state()


def test_a_scale_that_cannot_fall_ends_the_training() -> None:
    scale = LossScale(instead=({"precision.autocast": "bfloat16"}, {"precision.autocast": None}))
    fixes = "-> precision.autocast=bfloat16, or precision.autocast=null, or a smaller optimizer.lr"
    with pytest.raises(FloatingPointError, match=f"overflow float16 at a loss scale of 1, .*{fixes}"):
        for _ in range(30):
            scale.judge(True)
    assert (scale.value, scale.skipped) == (LEAST, 17)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("offload", [False, True])
def test_an_overflow_skips_the_step(value: float, offload: bool, capfd: pytest.CaptureFixture[str]) -> None:
    stepper = Stepper(parameters("float16"), ADAMW, "float16", offload=offload, bsize=9)
    good, bad = gradients(0, "float16"), gradients(1, "float16")
    stepper.step(good)
    ran = stepper.ops
    weights, state = copies(stepper.updates.weights()), copies(stepper.updates.state())
    rounded = {name: p.detach().clone() for name, p in stepper.named.items()}
    bad["last"][1, 2] = value
    for skipped in (1, 2):
        stepper.step(good, bad)
        assert stepper.ops == ran, "its trace is that of any step"
        assert_same(stepper.updates.weights(), weights)
        assert_same(stepper.updates.state(), state)
        assert_same({name: p.detach() for name, p in stepper.named.items()}, rounded)
        assert stepper.updates.scale == START / 2**skipped
        before = f"{2 * stepper.updates.scale:g}"
        found = stepper.updates.skipped
        assert row(found) == ("precision.dtype", "float16", ["precision.dtype=float32"]) and before in found.message
    said = capfd.readouterr().out.splitlines()
    reported = (
        "gradients overflow float16 at a loss scale of {} (now it is {}): no update on any rank, {} skipped so far"
    )
    assert said == [reported.format(65536, 32768, 1), reported.format(32768, 16384, 2)]
    stepper.step(good)
    assert int(stepper.updates.state()["last"]["step"]) == 2
    assert stepper.updates.skipped is None


@pytest.mark.parametrize("name", ["embedding", "last"])
@pytest.mark.parametrize("tied", [[], ["embedding"], ["embedding", "last"]])
def test_an_overflow_of_a_tied_gradient_skips_the_step(tied: list[str], name: str) -> None:
    """It is no part of what is summed over replicas."""
    stepper = Stepper(parameters("float16"), ADAMW, "float16", tied=tied)
    weights, bad = copies(stepper.updates.weights()), gradients(1, "float16")
    bad[name][1, 2] = float("inf")
    stepper.step(bad)
    assert_same(stepper.updates.weights(), weights)
    assert stepper.updates.scale == START / 2


def test_a_scale_that_is_fixed_too_large_says_what_to_do() -> None:
    one = replace(case("tied", 2, m=2, loss_scale=1e30), dtype="float16")

    def work(session: Session) -> Problem | None:
        return session.step(one.model.sample(one.samples)).skipped

    found = run_session(one.engine, one.model, one.plan, one.spec, work)
    assert row(found) == ("engine.loss_scale", 1e30, ["engine.loss_scale=null"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes_skip_nothing(dtype: str) -> None:
    """Their range is that of float32: what is not finite there is an error of the training, to be seen."""
    stepper = Stepper(parameters(dtype), ADAMW, dtype)
    bad = gradients(1, dtype)
    bad["last"][1, 2] = float("inf")
    stepper.step(bad)
    assert not torch.isfinite(stepper.named["last"]).all()
    assert torch.isfinite(stepper.named["embedding"]).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 10, 16, 64, 100])
def test_a_sum_of_what_is_no_overflow_is_finite(ranks: int) -> None:
    """In any order, each addition rounded: it is tried with the largest that passes."""
    values = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)  # all finite ones from zero up, in order
    passing = [float(one) for one in values[-12000:] if not overflows(one.expand(1), ranks)]
    largest = torch.tensor(max(passing), dtype=torch.float16)
    total = torch.zeros((), dtype=torch.float16)
    for _ in range(ranks):
        total = total + largest
    assert torch.isfinite(total)
    assert float(largest) * ranks > 0.9 * LARGEST, "and little is refused that would have been finite"
    assert overflows(torch.tensor([0.0, -LARGEST, 0.0], dtype=torch.float16), ranks) == (ranks > 1)
    assert not overflows(torch.empty(0, dtype=torch.float16), ranks)
