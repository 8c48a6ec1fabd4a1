"""Check that a model of the user's own takes its samples and gives what its loss needs, before anything is measured.

    layers -> sample -> layer by layer -> shape of the output -> loss -> sum over the samples?

All of it without memory, as `harness.measure.count_model` counts; what that cannot run, such as code that looks at the
values of tensors, is run for real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.core.problem import CannotRun, Problem
from harness.interfaces import Batch, Model
from harness.measure.count_model import pretend
from harness.measure.layer_chain import Chain, Task, Value
from harness.measure.layer_traits import trained
from harness.nn import dropout
from harness.nn.fake_tensors import leaving_none
from harness.runtime.training_state import split_batch
from harness.runtime.values import mapped, split, tensors_of
from harness.user_model.load import cause

SMALL_BYTES = 1 << 30
"""Weights with which a model is run for real to find out what is wrong with it."""
LARGEST_CHECKED = 10**7
"""Numbers of an output on which a loss is tried."""
TOLERANCE, NOTHING = 1e-4, 1e-6
"""Losses are equal whose relative difference is below the first, or whose difference is below the second."""


def check(model: Model, samples: int, dtype: str, autocast: str | None = None, whole: bool = False) -> None:
    """Raise CannotRun if a micro-batch of so many samples, or a `whole` batch, cannot be trained on, with the user's
    own traceback.

    Messages begin with the model's name, and name the layer.
    """
    with torch.random.fork_rng(devices=[]), dropout.keyed(seed=0, step=0, micro_batch=0):
        try:
            return _check_loss(model, *_check(model, samples, dtype, autocast, pretending=True), whole)
        except CannotRun:
            if _weight_bytes(model) > SMALL_BYTES:
                raise
        # not in the handler: a traceback has no other one
        return _check_loss(model, *_check(model, samples, dtype, autocast, pretending=False), whole)


def _check(model: Model, samples: int, dtype: str, autocast: str | None, pretending: bool) -> tuple[Value, Value]:
    """Return output and targets of a pass."""
    kind = torch.device("meta" if pretending else "cpu")
    with _telling(model, "making its layers and samples"):
        chain = Chain(model, samples, getattr(torch, dtype), kind, autocast)
    _check_batch(model, chain.batch, samples)
    with ExitStack() as stack:
        stack.enter_context(leaving_none(chain.layers))
        if pretending:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            pretend(chain, torch.device("cpu"), mode)
            stack.enter_context(mode)
        shape = _shape(chain.batch.inputs)
        with _telling(model, f"its layers on {samples} samples, inputs of {shape}", _constants(model)):
            tasks = chain.forward(lambda index, phase: nullcontext())
        output = tasks[-1].output
        _check_output(model, output, samples)
        with _telling(model, f"its loss on an output of {_shape(output)} and targets of {_shape(chain.batch.targets)}"):
            loss = model.loss(output, chain.batch.targets)
        if not isinstance(loss, Tensor) or loss.dim():
            what = f"a tensor of {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise CannotRun([Problem("model", model.name, f"has a loss that returns {what}, it must be one number")])
        _check_trained(model, chain, tasks)
    return output, chain.batch.targets


def _check_loss(model: Model, output: Value, targets: Value, whole: bool) -> None:
    if _wanted(model, len(tensors_of(targets)[0])) is None:
        _check_sum(model, output, targets, whole)


def _check_batch(model: Model, batch: Batch, samples: int) -> None:
    for name, value in (("inputs", batch.inputs), ("targets", batch.targets)):
        if not all(isinstance(one, Tensor) and one.dim() and len(one) == samples for one in tensors_of(value)):
            message = f"has {name} of {_shape(value)} for {samples} samples: the first dimension must be the sample"
            raise CannotRun([Problem("model", model.name, message)])


def _check_output(model: Model, output: Value, samples: int) -> None:
    """The output must have the shape that the task says, so that a target fits it."""
    expected = _wanted(model, samples)
    if expected is None or (isinstance(output, Tensor) and tuple(output.shape) == expected):
        return
    message = f"gives {_shape(output)} for {samples} samples, a model for {model.task} must give {expected}"
    raise CannotRun([Problem("model", model.name, message, hint=_fitting(output, expected))])


def _check_trained(model: Model, chain: Chain, tasks: list[Task]) -> None:
    """The loss must depend on a weight, and the backward pass from it must run."""
    if not any(weight.requires_grad for weight in chain.layers.parameters()):
        hint = "requires_grad_(True) for those that are trained"
        raise CannotRun([Problem("model", model.name, "has no weight that requires a gradient", hint=hint)])
    if not trained(chain, tasks):
        message = "has a loss that depends on none of its weights: it cannot be trained"
        hint = "outputs that are made of weights by functions with a gradient: no argmax, no detach()"
        raise CannotRun([Problem("model", model.name, message, hint=hint)])
    with _telling(model, "its backward pass"):
        chain.backward(tasks, lambda index, phase: nullcontext())


def _wanted(model: Model, samples: int) -> tuple[int, ...] | None:
    """The shape of the output, of a model whose loss is not the user's own."""
    shape_of: Callable[[int], tuple[int, ...] | None] = getattr(model, "output_shape_of", lambda n: None)
    return shape_of(samples)


def _fitting(output: Value, expected: tuple[int, ...]) -> str:
    """What to change, if the last size alone is another one."""
    found = tuple(output.shape) if isinstance(output, Tensor) else ()
    if len(found) == len(expected) and found[:-1] == expected[:-1]:
        return f"a last layer of {expected[-1]}, or {found[-1]} where {expected[-1]} is given"
    return ""


def _check_sum(model: Model, output: Value, targets: Value, whole: bool) -> None:
    """Refuse a loss of the user's that is not the sum of its samples': with micro-batches it would be another one.

    Shown by two samples, together and one by one: by any outputs and targets, or by the model's own where an output is
    not of the samples. A loss that does not take these, or draws random numbers, is left. `whole`: the batch is not
    split, so only a mean is refused.
    """
    try:
        both, again, parts = _losses(model, output, targets)
    except Exception:  # of the user's code, for samples that are not its own
        return
    if both != again or not all(map(math.isfinite, (both, parts))) or _same(both, parts):
        return
    if _same(2 * both, parts):
        message = "has a loss that is the mean over the samples: it must be their sum, or have one number for each"
        raise CannotRun([Problem("model", model.name, message, hint='reduction="sum" or "none"')])
    if not whole:
        message = "has a loss of its samples together: that of two is not the sum of theirs, so micro-batches and "
        message += "replicas would train for another one"
        hint = "a loss of each sample by itself, or engine=single batch.micro_batches=1"
        raise CannotRun([Problem("model", model.name, message, hint=hint)])


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=NOTHING)


def _losses(model: Model, output: Value, targets: Value) -> tuple[float, float, float]:
    """The loss of two samples, again, and the sum of theirs. Raises ValueError where the model is too large for it."""
    found = list(tensors_of(output))
    if any(not one.dim() or len(one) != len(tensors_of(targets)[0]) for one in found):  # one that is not of the samples
        return _own_losses(model)
    if sum(one.numel() * 2 // len(one) for one in found) > LARGEST_CHECKED:
        raise ValueError("too large")
    outputs, wanted = (mapped(_any_two, value) for value in (output, targets))
    pairs = zip(split(outputs, 2), split(wanted, 2), strict=True)
    both, again = (float(model.loss(outputs, wanted)) for _ in range(2))
    return both, again, sum(float(model.loss(one, target)) for one, target in pairs)


def _own_losses(model: Model) -> tuple[float, float, float]:
    """`_losses` of the model's own outputs, in evaluation: batch norms take their statistics from nowhere else."""
    if _weight_bytes(model) > SMALL_BYTES:
        raise ValueError("too large")
    chain = Chain(model, 2, torch.float64, torch.device("cpu"))
    chain.layers.eval()

    def loss(batch: Batch) -> float:
        chain.batch = batch
        with torch.no_grad():
            return float(model.loss(chain.forward(lambda index, phase: nullcontext())[-1].output, batch.targets))

    both = chain.batch
    return loss(both), loss(both), sum(map(loss, split_batch(both, 2)))


def _any_two(like: Tensor) -> Tensor:
    """Two samples of the shape of these, of numbers from 0 to 1, or of zeros where they are whole."""
    shape = (2, *like.shape[1:])
    return torch.rand(shape, dtype=like.dtype) if like.is_floating_point() else torch.zeros(shape, dtype=like.dtype)


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, tuple):
        return " and ".join(map(_shape, value))
    return type(value).__name__


@contextmanager
def _telling(model: Model, what: str, hint: str = "") -> Iterator[None]:
    """Raise CannotRun for whatever the user's code raises, `sys.exit` too."""
    try:
        yield
    except CannotRun:
        raise
    except (Exception, SystemExit) as error:
        found = cause(model.name, error, f"in {what}")
        raise CannotRun([replace(found, hint=found.hint or hint)]) from error


def _constants(model: Model) -> str:
    """The tensors that are the same in each call: one of them may have been meant as an input of each sample."""
    found: str = getattr(model, "constant_inputs", str)()
    return f"the same in each call, as its first size is not the number of samples: {found}" if found else ""


def _weight_bytes(model: Model) -> int:
    """Bytes of the weights; more than is small if even the layers cannot be made without memory."""
    try:
        with torch.device("meta"):
            return sum(p.numel() * p.element_size() for p in model.layers().parameters())
    except Exception:  # of the user's, which running it for real shows
        return 0
