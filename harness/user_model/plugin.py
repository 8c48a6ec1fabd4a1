"""The plug-in of users' models: what `harness.config.registry` asks of it for a model with the key `callable`.

settings   ->   call net.py:build(width=64)   ->   a module, with the task of the keys
                                                   Classifier, LanguageModel, Regression, Custom
                                                   a model with the whole interface
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from harness.core.problem import CannotRun, Problem, spelled
from harness.interfaces import Batch, Model
from harness.user_model import keys, loaded_signature
from harness.user_model.keys import NEEDED, SHARED
from harness.user_model.reference import Reference, parse

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.capture import Captured
    from harness.user_model.wrappers import Wrapper

check = keys.problems
identity, renamed = keys.identity, keys.renamed
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call: by position and by keyword."""
INTERFACE = ("name", "task", "input_shape", "classes", "layers", "sample", "loss")
EXAMPLES = {
    "classification": "Classifier(module, input_shape=(3, 32, 32), classes=10)",
    "text": "LanguageModel(module, vocabulary=256, sequence=128)",
    "regression": "Regression(module, input_shape=(8,), output_shape=(1,))",
    "custom": "Custom(module, example_batch=(inputs, targets), loss=loss)",
}


def build(settings: Mapping[str, Any]) -> Model:
    """The model of a user's callable. Raises CannotRun for what the callable raises, and for what it returns if no
    model can be made of that."""
    place = parse(settings["callable"])

    def make() -> Any:
        return loaded_signature.call(place, settings)

    made = without_memory(make)
    if has_interface(made):
        whole: Model = make()
        return whole
    wrapper = _wrapped(made, place, settings)
    return UserModel(_name(place, settings), wrapper, lambda: _wrapped(make(), place, settings))


class UserModel:
    """A model whose layers are made by calling the user's callable again. Implements `harness.interfaces.Model`."""

    def __init__(self, name: str, wrapper: Wrapper, make: Callable[[], Wrapper]) -> None:
        self.name, self.task = name, wrapper.task
        self.input_shape, self.classes = wrapper.input_shape, wrapper.classes
        self._wrapper, self._make = wrapper, make
        self._filled: Wrapper | None = None
        self._result = Result(wrapper.select)

    def layers(self) -> nn.Sequential:
        """The layers of a module that is made now."""

        module = without_memory(self._module) if _on_meta() else self._module()
        return as_layers(module, self._with_values().arguments(), self._result.seen)

    def captured(self) -> Captured | None:
        """A module that is made now, and its layers; None if these are its own."""
        from harness.capture import Captured

        module, (args, kwargs) = self._module(), self._with_values().arguments()
        layers = as_layers(module, (args, kwargs), self._result.seen)
        return None if layers is module else Captured(module, layers, args, kwargs, self._wrapper.select)

    def sample(self, n: int) -> Batch:
        """n samples, as the wrapper draws them."""
        return self._with_values().sample(n)

    def loss(self, output: Any, target: Any) -> Tensor:
        """The wrapper's loss, of what the module itself would give: a chain of layers passes tensors alone."""
        return self._wrapper.loss(self._result.of(output), target)

    def output_shape_of(self, n: int) -> tuple[int, ...] | None:
        """The shape of the output for n samples, if the task says it."""
        return self._wrapper.output_shape_of(n)

    def constant_inputs(self) -> str:
        """The tensors that are the same in each call, with their shapes."""
        return self._wrapper.constant_inputs()

    def _module(self) -> nn.Module:
        """A module that is made now, without what torch.compile has compiled. Weights that wait for a first pass, as
        those of nn.LazyLinear, have had it; Transformers' default experts, of some number formats alone, are replaced
        by those of every one."""
        import torch
        from torch.nn.parameter import is_lazy

        from harness.capture import experts
        from harness.user_model.module_forms import unwrap_inside

        module = self._make().module
        _refuse_scripts(module, self.name)
        unwrap_inside(module)
        experts.use(module)
        if any(map(is_lazy, itertools.chain(module.parameters(), module.buffers()))):
            with torch.random.fork_rng(devices=[]):
                args, kwargs = self._with_values().arguments()
            flags = {each: each.training for each in module.modules()}
            with torch.no_grad():
                module.eval()(*args, **kwargs)
            for each, flag in flags.items():
                each.training = flag
        return module

    def _with_values(self) -> Wrapper:
        """The wrapper; one with an example is made again where tensors have values, once and always the same."""
        import torch

        if not getattr(self._wrapper, "without_values", False) or _on_meta():
            return self._wrapper
        if self._filled is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self._filled = self._make()
        return self._filled


def _refuse_scripts(module: nn.Module, name: str) -> None:
    """Raises CannotRun for modules that TorchScript has compiled: their weights cannot be replaced, as a profile
    without memory and shards need it."""
    import torch

    if found := [path for path, each in module.named_modules() if isinstance(each, torch.jit.ScriptModule)]:
        what = f"its module {found[0]!r}" if found[0] else "it"
        message = f"is compiled by TorchScript ({what}): engines need the modules themselves"
        raise CannotRun([Problem("model", name, message, hint="without torch.jit.script and torch.jit.trace")])


class Result:
    """What a module gives: a tensor, or containers (a dictionary, a dataclass) around the tensors that a chain of its
    layers passes. `select` takes a part of it."""

    def __init__(self, select: Callable[[Any], Any]) -> None:
        self._select = select
        self._form: Any = None

    def seen(self, result: Any) -> Any:
        """The selected part of a result, whose form is kept."""
        from torch import Tensor

        from harness.capture.structure import Ref, template

        part, numbers = self._select(result), itertools.count()
        self._form = template(part, lambda leaf: Ref(next(numbers)) if isinstance(leaf, Tensor) else leaf)
        return part

    def of(self, output: Any) -> Any:
        """The result with these tensors; they themselves, of layers that the module has of its own."""
        from harness.capture.structure import Ref, built, tensors

        if self._form is None:
            return output
        given = tensors(output)
        return built(self._form, lambda leaf: given[leaf.number] if isinstance(leaf, Ref) else leaf)


def as_layers(module: nn.Module, arguments: Arguments, select: Callable[[Any], Any] | None = None) -> nn.Sequential:
    """The layers of a module: its own if it is an nn.Sequential, else what `harness.capture` finds for these arguments.

    They give what `select` takes of its result. One layer if it cannot be split.
    """
    from torch import nn

    from harness.capture import split_or_whole

    args, kwargs = arguments
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not kwargs:
        return module
    return split_or_whole(module, args, kwargs, select)


def without_memory(make: Callable[[], Any]) -> Any:
    """What `make` returns, on the meta device; torch's random generator is left as it was.

    Code that needs values of tensors is run on the CPU, and a module that it returns is moved.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return make()
        except CannotRun:
            pass  # what is wrong there, too, is raised again
        with torch.device("cpu"):
            made = make()
    module = made if isinstance(made, torch.nn.Module) else getattr(made, "module", None)
    if isinstance(module, torch.nn.Module):
        module.to("meta")
    return made


def _on_meta() -> bool:
    import torch

    return torch.get_default_device().type == "meta"


def has_interface(made: Any) -> bool:
    """Whether an object is a model by itself."""
    return all(hasattr(made, name) for name in INTERFACE) and not isinstance(made, type)


def _wrapped(made: Any, place: Reference, settings: Mapping[str, Any]) -> Wrapper:
    """The wrapper that a callable returned, or one of the keys around its module."""
    from torch import nn

    from harness.user_model.wrappers import Classifier, LanguageModel, Regression, Wrapper

    own = {one.name for one in loaded_signature.of(place).keys}
    given: dict[str, Any] = {key: settings[key] for key in SHARED if settings.get(key) is not None}
    if isinstance(made, Wrapper):
        if twice := [key for key in given if key not in own]:
            what = type(made).__name__
            fixes = ({f"model.{key}": "~" for key in twice},)
            message = f"is given, and {place.shown} returns a {what}, which says what it is trained on"
            raise CannotRun([Problem(f"model.{twice[0]}", given[twice[0]], message, fixes)])
        return made
    if not isinstance(made, nn.Module):
        raise CannotRun([_no_model(made, place)])
    if isinstance(made, nn.Sequential) and not len(made):
        raise CannotRun([Problem("model", place.shown, "returns a Sequential without layers")])
    task = given.get("task")
    if task not in NEEDED or keys.missing(settings, task):
        raise CannotRun([_no_task(made, place, given)])
    if task == "classification":
        return Classifier(made, given["input"], given["classes"])
    if task == "text":
        return LanguageModel(made, given["vocabulary"], given["sequence"])
    return Regression(made, given["input"], given["output"])


def _no_model(made: Any, place: Reference) -> Problem:
    """What a callable returned instead of a model."""
    lacking = [name for name in INTERFACE if not hasattr(made, name)]
    hint = f"an nn.Module, or one in a wrapper: return {EXAMPLES['classification']}"
    if isinstance(made, type):
        return Problem("model", place.shown, f"returns the class {made.__name__}, it must return a model", hint=hint)
    if len(lacking) <= len(INTERFACE) // 2:
        message = f"returns a {type(made).__name__} without {', '.join(lacking)}, which a model has"
        return Problem("model", place.shown, message, hint="docs/tutorials/own_model.md lists what a model has")
    what = "None" if made is None else f"{type(made).__name__} {made!r:.60}"
    message = f"returns {what}, it must return a model"
    return Problem("model", place.shown, message, hint=f"{'return the module: ' if made is None else ''}{hint}")


def _no_task(made: nn.Module, place: Reference, given: Mapping[str, Any]) -> Problem:
    """All that could be added to a plain module, to be copied."""
    what = type(made).__name__
    message = f"returns a {what} alone: what are its input, its target and its loss?"
    tasks = [given["task"]] if given.get("task") in NEEDED else list(NEEDED)
    lines = ["one of these lines of keys:"]
    for task in tasks:
        needed = {"task": task} | NEEDED[task] | {key: given[key] for key in NEEDED[task] if key in given}
        lines.append("    " + " ".join(f"model.{key}={spelled(value)}" for key, value in needed.items()))
    lines.append(f"or one of these wrappers, in {place.shown.rpartition(':')[0]}:")
    for line in EXAMPLES.values():
        lines.append(f"    from harness import {line.partition('(')[0]}; return {line}")
    return Problem("model", place.shown, message, hint="\n".join(lines))


def _name(place: Reference, settings: Mapping[str, Any]) -> str:
    """net.py:build width=128, with the keys that have other values than by default."""
    found = loaded_signature.of(place)
    own = {one.name: one.default for one in found.keys}
    other = {key: settings[key] for key, default in own.items() if settings[key] != default}
    other |= {key: settings[key] for key in SHARED if key not in own and settings.get(key) is not None}
    return " ".join([place.title, *(f"{key}={spelled(value)}" for key, value in other.items())])
