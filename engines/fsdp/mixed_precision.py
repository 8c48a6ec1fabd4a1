"""FSDP2's own mixed precision, `engine.mixed_precision=policy`: layers compute in the format of precision.autocast.

    shards   float32   -- cast, gathered -->   weights     bfloat16
             float32   <-- cast, summed ----   gradients   bfloat16

torch casts weights where it gathers a group of layers, and floating-point tensors that enter a layer of the group or
the stage. In a layer nothing is cast: it computes in the dtype of what it gets. Buffers stay as they are, running
statistics among them, so batch norms get their weights in the dtype of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase

from harness.core.problem import Problem, ProblemError
from harness.interfaces import SessionSpec

if TYPE_CHECKING:
    from engines.fsdp.engine import Config


def policy(config: Config, spec: SessionSpec) -> MixedPrecisionPolicy:
    """The policy of all groups: weights and inputs in `spec.autocast`, sums of gradients in `spec.dtype`. Without mixed
    precision, or where autocast makes it, one that casts nothing."""
    if config.mixed_precision != "policy" or not spec.autocast:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=getattr(torch, spec.autocast), reduce_dtype=getattr(torch, spec.dtype))


def keep_statistics(stage: nn.Module) -> None:
    """Have norms with running statistics compute with weights of the statistics' dtype: torch takes no other ones."""
    for module in stage.modules():
        if isinstance(module, _NormBase) and module.affine and module.running_mean is not None:
            _cast_weights(module, module.running_mean.dtype)


def _cast_weights(norm: _NormBase, dtype: torch.dtype) -> None:
    forward = norm.forward

    def with_cast_weights(*inputs: Any) -> Any:
        own = dict(norm._parameters)
        norm._parameters.update({name: value.to(dtype) for name, value in own.items() if value is not None})  # type: ignore[misc]  # tensors in the place of parameters
        try:
            return forward(*inputs)
        finally:
            norm._parameters.update(own)

    norm.forward = with_cast_weights


TWO_DTYPES = re.compile(
    "scalar type|same d?type|mixed dtype|[Ff]ound dtype|[Dd]ata ?types?|BFloat16|Half|bfloat16|float16"
)
"""In the messages of torch's operations about dtypes."""


@contextmanager
def explained(policy: MixedPrecisionPolicy) -> Iterator[None]:
    """Raise ProblemError for an operation that takes no two dtypes: autocast casts for it, a policy does not."""
    try:
        yield
    except RuntimeError as error:
        if not policy.param_dtype or not TWO_DTYPES.search(str(error)):
            raise
        given = str(policy.param_dtype).removeprefix("torch.")
        message = f"gives layers {given}, and one computes with another dtype, too: {error}"
        found = ProblemError(
            Problem("engine.mixed_precision", "policy", message, ({"engine.mixed_precision": "autocast"},))
        )
        found.__notes__ = [*getattr(error, "__notes__", [])]
        raise found from error
