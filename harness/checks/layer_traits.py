"""Check a plan against what the model's layers do: what would fail or train another model is refused before it runs.

together     layers that must be in one stage: one uses the other's weight, ...
anywhere     what an engine cannot do with any plan: sparse gradients, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter

from omegaconf import DictConfig

from harness.checks.mesh import given_balance
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Fix, Problem
from harness.core.shared_buffers import together
from harness.core.traits import Given
from harness.interfaces import Capabilities

HIDDEN = "an attribute of the layer itself that is this parameter or module"
REAL = "torch.view_as_real where it is made"
AS_REAL = "a weight of real numbers, and torch.view_as_complex of it in forward"
_odd = attrgetter(
    *("changes", "max_norm", "sparse", "scalars", "empty"), *("draws", "too_large", "complex", "integers", "strided")
)
"""What some engines cannot run wherever the layer is. Few layers have any of it, and searches ask for many plans."""
MEMORY = "one parameter in both places, or clone() for one of them"


def refused(config: DictConfig, can: Capabilities, plan: Plan, profile: ModelProfile) -> list[Problem]:
    """The problems of a plan for an engine."""
    return [*_stages(config, can, plan, profile), *_anywhere(config, can, plan, profile), *_graphed(config, profile)]


def _stages(config: DictConfig, can: Capabilities, plan: Plan, profile: ModelProfile) -> Iterator[Problem]:
    """Layers that are in several stages and must be in one."""
    found = list(_groups(config.engine.name, can, profile))
    fixes = (*together(plan, [pair for pair, _, _ in found]), _other_engine(config, "single"))
    for pair, message, hint in found:
        first, last = map(plan.stage_of, pair)
        if first != last:
            layer = f"model, its layer {profile.layers[pair[1]].name!r}"
            yield Problem(layer, None, f"{message} (stages {first} and {last})", fixes, hint)


def _groups(engine: str, can: Capabilities, profile: ModelProfile) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Pairs of layers that must be in one stage, each with the message and a hint if they are not."""
    layers = profile.layers
    number = {layer.name: index for index, layer in enumerate(layers)}
    for index, layer in enumerate(layers):
        traits = layer.traits
        for name in traits.uses if can.multi_process else ():
            other = number[name.partition(".")[0]]
            message = f"uses {name!r}, which is none of its own: its process has a copy of that, which nothing trains"
            yield _ordered(index, other), message, HIDDEN
        if traits.in_place is not None:
            message = (
                f"works in place on one of two tensors that share memory where layer "
                f"{layers[traits.in_place].name!r} makes them: from stage to stage each is copied"
            )
            yield (traits.in_place, index), message, "clone() one of them where they are made, or work out of place"
    for index, (one, _) in enumerate(pairwise(layers)):
        given = one.traits.gives
        if dtypes := [g.dtype for g in given if g.dtype.startswith("complex") and not can.complex]:
            yield (index, index + 1), _complex(engine, dtypes[0]), REAL
        passing = [*given, *(skip.tensor for skip in profile.skips if skip.source <= index < skip.target)]
        if not can.mixed and {g.gradient for g in passing} == {True, False}:
            kinds = " and ".join(g.dtype for g in passing)
            message = f"takes tensors of {kinds}, and engine={engine} wants a gradient for each or for none of them"
            yield (index, index + 1), message + _frozen(profile, index), ""
    for skip in profile.skips:
        if skip.tensor.dtype.startswith("complex") and not can.complex:
            yield (skip.source, skip.target), _complex(engine, skip.tensor.dtype), REAL
    for one_name, other_name in profile.same_memory if can.multi_process else ():
        pair = _ordered(*(number[name.partition(".")[0]] for name in (one_name, other_name)))
        if pair[0] != pair[1]:
            yield pair, f"has {other_name!r}, which shows the memory of {one_name!r}: they would become two", MEMORY


def _frozen(profile: ModelProfile, index: int) -> str:
    """Which frozen layers give a tensor without a gradient that goes from layer `index` to the next one, as a clause;
    "" where none does: whole numbers never have one."""
    giving = {skip.source for skip in profile.skips if skip.source <= index < skip.target and _is_constant(skip.tensor)}
    giving |= {index} if any(map(_is_constant, profile.layers[index].traits.gives)) else set()
    untrained = [one for one in sorted(giving) if one < profile.first_trained]
    names = " and ".join(repr(profile.layers[one].name) for one in untrained)
    return f": what {names} gives has none, because all layers up to there are frozen" if names else ""


def _is_constant(tensor: Given) -> bool:
    return not tensor.gradient and tensor.dtype.startswith(("float", "bfloat", "complex"))


def _complex(engine: str, dtype: str) -> str:
    return f"takes a tensor of {dtype}, which engine={engine} does not send from stage to stage"


def _anywhere(config: DictConfig, can: Capabilities, plan: Plan, profile: ModelProfile) -> Iterator[Problem]:
    """What the engine cannot do however the layers are placed."""
    engine = config.engine.name
    other = (_other_engine(config, "ddp" if plan.mesh.data > 1 else "single"),)

    def problem(message: str, fixes: tuple[Fix, ...], hint: str = "") -> Problem:
        return Problem("model", profile.model, message, fixes, hint)

    if profile.by_value and not can.by_value:
        message = f"chooses by the values of tensors what it computes ({profile.by_value})"
        message += f": engine={engine} must know its messages before the values"
        yield problem(message, (_other_engine(config, "gpipe"),) if plan.mesh.pipeline > 1 else other)
    if not can.same_memory:
        for first, second in profile.same_memory:
            if plan.stage_of(_layer(profile, first)) == plan.stage_of(_layer(profile, second)):
                message = f"has {first!r} and {second!r}, which show the same memory: engine={engine} keeps them apart"
                yield problem(message, other, MEMORY)
    for index, layer in enumerate(profile.layers):
        traits = layer.traits
        if not any(_odd(traits)):
            continue
        if traits.sparse and not can.sparse:
            message = f"has sparse gradients of {traits.sparse[0]!r}, engine={engine} takes dense ones"
            yield problem(message, other, "sparse=False")
        if traits.sparse and config.optimizer.fused:
            message = f"takes dense gradients, and those of {traits.sparse[0]!r} are sparse"
            yield Problem("optimizer.fused", True, message, ({"optimizer.fused": False},), "sparse=False")
        if traits.scalars and not can.scalars:
            message = f"has {traits.scalars[0]!r} without a dimension, which engine={engine} does not take"
            yield problem(message, other, "a shape of (1,)")
        if traits.empty and not can.empty:
            message = f"has {traits.empty[0]!r} without elements, which engine={engine} does not take"
            yield problem(message, other)
        if traits.complex and not can.complex_weights:
            message = f"has complex numbers in {traits.complex[0]!r}, engine={engine} takes weights of real ones"
            yield problem(message, other, AS_REAL)
        if traits.complex and config.optimizer.fused:
            message = f"takes real numbers, and {traits.complex[0]!r} has complex ones"
            yield Problem("optimizer.fused", True, message, ({"optimizer.fused": False},), AS_REAL)
        if config.optimizer.name == "muon" and (odd := [*traits.sparse, *traits.complex]):
            message = f"takes dense gradients of real numbers, {odd[0]!r} has others"
            yield Problem("optimizer.name", "muon", message, ({"optimizer.name": "sgd"},))
        if traits.integers and not can.integer_weights:
            message = f"has whole numbers in {traits.integers[0]!r}, engine={engine} takes weights of real ones"
            yield problem(message, other, "make it a buffer")
        if traits.strided and not can.strided_weights:
            message = f"has {traits.strided[0]!r}, which is not contiguous in memory as engine={engine} takes weights"
            yield problem(message, other, "contiguous() where it is made")
        if traits.draws and _recomputed(plan):
            message = f"takes random numbers of Python or NumPy in layer {layer.name!r}: a recomputation gets others"
            yield problem(message, ({"engine.checkpoint": "never"},), "torch's random numbers")
        if traits.too_large and _recomputed(plan):
            message = f"has too many objects in {traits.too_large} (layer {layer.name!r}): each recomputation would "
            message += "look at all of them"
            yield problem(message, ({"engine.checkpoint": "never"},), "keep them outside of the module")
        yield from (problem(*found) for found in _changing(config, can, plan, profile, index))


def _changing(
    config: DictConfig, can: Capabilities, plan: Plan, profile: ModelProfile, index: int
) -> Iterator[tuple[str, tuple[Fix, ...], str]]:
    """Message, fixes and hint where a layer changes weights in its forward pass."""
    layer = profile.layers[index]
    if not (layer.traits.changes or layer.traits.max_norm):
        return
    single = (_other_engine(config, "single"),)
    copied = _copied(index, can, plan, profile)
    if layer.traits.max_norm and copied:
        message = f"has max_norm in layer {layer.name!r}, which changes its weight in the forward pass"
        yield f"{message}: copies would differ", single, "max_norm=None"
    if not layer.traits.changes:
        return
    message = f"changes the weight {layer.traits.changes[0]!r} in its forward pass"
    if copied and not layer.traits.max_norm:
        yield f"{message}: copies would differ", single, "make it a buffer"
    elif not copied and not can.changed_weights:
        yield f"{message}, where engine={config.engine.name} has a copy of it", single, "make it a buffer"
    if _recomputed(plan):
        fix = ({"engine.checkpoint": "never"},)
        yield f"{message}, and a recomputation would again", fix, "make it a buffer"


def _graphed(config: DictConfig, profile: ModelProfile) -> Iterator[Problem]:
    """What a CUDA graph cannot repeat, though the layers do it in each pass."""
    key = "precision.cuda_graphs"
    if not config.precision.cuda_graphs:
        return
    if profile.by_value:
        message = f"repeats the kernels of one pass, and values of tensors choose them ({profile.by_value})"
        yield Problem(key, True, message, ({key: False},))
    for layer in profile.layers:
        traits = layer.traits
        odd = {
            "uses weights of other layers": traits.uses,
            "changes weights": traits.changes or traits.max_norm,
            "works in place on memory that several tensors share": traits.in_place is not None,
            "has sparse gradients": traits.sparse,
            "has weights without a gradient": traits.unused,
            "takes random numbers of Python or NumPy": traits.draws,
        }
        if why := [what for what, has in odd.items() if has]:
            message = f"repeats the kernels of one pass, and layer {layer.name!r} {' and '.join(why)}"
            yield Problem(key, True, message, ({key: False},))
            return


def _copied(index: int, can: Capabilities, plan: Plan, profile: ModelProfile) -> bool:
    """Whether several processes or stages have the weights of a layer."""
    if can.multi_process and plan.mesh.data * plan.mesh.tensor > 1:
        return True
    shared = {tied.name for tied in profile.layers[index].tied}
    holders = [number for number, layer in enumerate(profile.layers) if shared & {tied.name for tied in layer.tied}]
    return len({plan.stage_of(number) for number in holders}) > 1


def _recomputed(plan: Plan) -> bool:
    return plan.recompute == "always" or (plan.recompute != "never" and plan.micro_batches > 1)


def _other_engine(config: DictConfig, engine: str) -> Fix:
    """A fix that takes another engine, on the part of the mesh that this engine has."""
    kept = {"single": (), "ddp": ("data",), "gpipe": ("pipeline",)}[engine]
    mesh: Fix = {f"mesh.{name}": 1 for name, size in config.mesh.items() if name not in kept and (size or 1) > 1}
    planner: Fix = {"planner": "balance"} if given_balance(config) and engine != "gpipe" else {}
    return {"engine": engine, **mesh, **planner}


def _layer(profile: ModelProfile, weight: str) -> int:
    return [layer.name for layer in profile.layers].index(weight.partition(".")[0])


def _ordered(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
