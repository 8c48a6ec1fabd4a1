"""The Python source of a layer's forward pass.

def run(self, value):
    t3, t9 = value
    t12 = self._modules['blocks']._modules['1'](t3, mask=t9)
    t13 = f0(t12, 1)                                     f0: torch.flatten
    return t13, t9
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from harness.capture.agreement import Follows, Limit, Samples, Scaled, Training, Unstable
from harness.capture.chain import Part
from harness.capture.graph import Graph
from harness.capture.structure import Nest, Ref, places, refs
from harness.capture.trace import Call, Item, State, Step, Uncapturable, used

BUILT_IN = (int, bool, str, bytes, type(None))
WHERES: WeakKeyDictionary[CodeType, dict[int, tuple[str, int]]] = WeakKeyDictionary()
"""Of the code of a layer's function: by the number of its line, file and line of the model that it stands for."""


class Program:
    """Writes one part of a chain as a function of the layer and the value that passes."""

    def __init__(self, graph: Graph, part: Part) -> None:
        self.graph, self.part = graph, part
        self.names: dict[str, Any] = {"no_grad": torch.no_grad, "finfo": torch.finfo, "__builtins__": __builtins__}
        self.outside: list[Tensor] = []
        self.lines: list[str] = []
        self._wheres: dict[int, tuple[str, int]] = {}
        self._objects: dict[int, str] = {}
        self._asks: set[str] = set()
        self._where = ("", 0)
        self._body()

    @property
    def source(self) -> str:
        """The text of the function."""
        return "\n".join(["def run(self, value):", *(f"    {line}" for line in self.lines)])

    def function(self) -> Callable[..., Any]:
        """The function itself."""
        code = compile(self.source, "<captured layer>", "exec")
        exec(code, self.names)
        run = self.names.pop("run")
        WHERES[run.__code__] = self._wheres
        return types.FunctionType(run.__code__, self.names, "run")

    def _body(self) -> None:
        part = self.part
        body: list[str] = []
        wheres: dict[int, tuple[str, int]] = {}
        last = self._last_uses()
        for index, node in enumerate(part.nodes):
            lines = self._node(node, last, index)
            gone = sorted({n for n in (*used(node), *refs(node.result)) if last.get(n) == index})
            begin = len(body)
            body += lines if node.grad else ["with no_grad():", *(f"    {line}" for line in lines)]
            wheres |= dict.fromkeys(range(begin, len(body)), node.where)
            body += ["del " + ", ".join(f"t{n}" for n in gone)] if gone else []
        body += [f"{place(state)} = {self._tensor(number)}" for state, number in part.assigns]
        body += [f"self.stash({name!r}, {self._tensor(number)})" for name, number in part.stashes.items()]
        body.append("return " + ", ".join(map(self._tensor, part.gives)))
        head = [*self._arrive(), *self._answers()]
        self.lines = [*head, *body]
        self._wheres = {len(head) + 2 + number: where for number, where in wheres.items()}  # below "def run", from 1 on

    def _arrive(self) -> list[str]:
        takes = [f"t{number}" for number in self.part.takes]
        lines = [f"{', '.join(takes)} = value"] if takes else []
        lines += ["del value"] if len(takes) > 1 else []
        return lines + [f"t{number} = self.pop({name!r})" for name, number in self.part.pops.items()]

    def _answers(self) -> list[str]:
        """Lines for the number of samples, the device and the dtype, as far as the layer asks for them."""
        arrives = [self.graph.values[number] for number in self.part.arrives()]
        lines = []
        if "samples" in self._asks:
            value = next(value for value in arrives if value.batch_dim)
            dim, factor = value.batch_dim or (0, 1)
            lines.append(f"samples = t{value.number}.shape[{dim}]" + (f" // {factor}" if factor > 1 else ""))
        if "device" in self._asks:
            lines.append(f"device = t{arrives[0].number}.device")
        if "dtype" in self._asks:
            held = [self.graph.values[number] for number in sorted(self.part.held)]
            follow = [value for value in (*arrives, *held) if value.follows_dtype]
            lines.append(f"dtype = {self._tensor(follow[0].number)}.dtype" if follow else "dtype = float32")
            self.names["float32"] = torch.float32
        return lines

    def _last_uses(self) -> dict[int, int]:
        """The last node that uses a tensor, of those that do not leave the layer."""
        leave = {*self.part.gives, *self.part.stashes.values(), *(number for _, number in self.part.assigns)}
        last: dict[int, int] = {}
        for index, node in enumerate(self.part.nodes):
            for number in (*used(node), *refs(node.result)):
                if number not in leave and not self.graph.is_held(self.graph.values[number]):
                    last[number] = index
        return last

    def _node(self, node: Item, last: dict[int, int], index: int) -> list[str]:
        self._where = node.where
        function = self._object(node.function) if isinstance(node, Step) else module_place(node.path)
        call = f"{function}({self._arguments(node.args, node.kwargs)})"
        if isinstance(node, Call) and node.leaves:
            call = f"({', '.join([call, *map(place, node.leaves)])})"
        found = [(path, leaf.number) for path, leaf in places(node.result) if isinstance(leaf, Ref)]
        found = [(path, number) for path, number in found if not self.graph.is_held(self.graph.values[number])]
        if not found:
            return [call]
        if found[0][0] == "":
            return [f"t{found[0][1]} = {call}"]
        return [f"result = {call}", *(f"t{number} = result{path}" for path, number in found), "del result"]

    def _arguments(self, args: Nest, kwargs: Nest) -> str:
        named = [f"{key}={self._value(item)}" for key, item in zip(kwargs.keys or (), kwargs.items, strict=True)]
        return ", ".join([*map(self._value, args.items), *named])

    def _value(self, form: Any) -> str:
        if isinstance(form, Ref):
            return self._tensor(form.number)
        if isinstance(form, Nest):
            return self._nest(form)
        if isinstance(form, Samples):
            text = f"{form.factor} * {self._ask('samples')}" if form.factor != 1 else self._ask("samples")
            return f"({text} + {form.offset})" if form.offset else text
        if isinstance(form, Scaled):
            return f"({form.factor!r} {'*' if form.power == 1 else '/'} {self._ask('samples')})"
        if isinstance(form, Training):
            return f"({self._value(form.training)} if self.training else {self._value(form.evaluation)})"
        if isinstance(form, Follows):
            return self._ask("dtype" if form is Follows.DTYPE else "device")
        if isinstance(form, Limit):
            return f"finfo({self._ask('dtype')}).{form.name}"
        if isinstance(form, Unstable):
            what = f"makes a {type(form.value).__name__} and gives it to a torch function"
            if isinstance(form.value, int | float):
                what = "gives a torch function a number that differs with the number of samples, or from pass to pass"
            raise Uncapturable(f"it {what}", self._where)
        plain = type(form) in BUILT_IN or (type(form) is float and math.isfinite(form))
        return repr(form) if plain else self._object(form)

    def _nest(self, form: Nest) -> str:
        items = [self._value(item) for item in form.items]
        kind = self._object(form.kind)
        if form.kind in (tuple, torch.Size):
            return f"({', '.join(items)}{',' * (len(items) == 1)})"
        if form.kind is list:
            return f"[{', '.join(items)}]"
        if form.by_keyword:
            return f"{kind}({', '.join(f'{key}={item}' for key, item in zip(form.keys or (), items, strict=True))})"
        if form.keys is not None:
            pairs = ", ".join(f"{self._value(key)}: {item}" for key, item in zip(form.keys, items, strict=True))
            return f"{{{pairs}}}" if form.kind is dict else f"{kind}({{{pairs}}})"
        positional = form.kind is slice or form.by_position
        return f"{kind}({', '.join(items)})" if positional else f"{kind}(({', '.join(items)},))"

    def _tensor(self, number: int) -> str:
        source = self.graph.values[number].source
        if isinstance(source, State):
            return place(source)
        if isinstance(source, Tensor):
            return self._outside(source)
        return f"t{number}"

    def _outside(self, tensor: Tensor) -> str:
        """A tensor from outside of the model: a buffer of the layer, so that it moves with it."""
        if tensor.requires_grad:
            return self._object(tensor)
        numbers = [k for k, known in enumerate(self.outside) if known is tensor]
        if not numbers:
            self.outside.append(tensor)
        return f"self._buffers['{outside_name((numbers or [len(self.outside) - 1])[0])}']"

    def _object(self, value: Any) -> str:
        if id(value) not in self._objects:
            self._objects[id(value)] = name = f"f{len(self._objects)}"
            self.names[name] = value
        return self._objects[id(value)]

    def _ask(self, what: str) -> str:
        self._asks.add(what)
        return what


def module_place(path: str) -> str:
    """The expression for a module of a layer."""
    return "self" + "".join(f"._modules[{name!r}]" for name in path.split(".") if name)


def place(state: State) -> str:
    """The expression for a tensor that a module of a layer holds."""
    return f"{module_place(state.path)}.{state.table}[{state.name!r}]"


def outside_name(number: int) -> str:
    """The name of a buffer for a tensor from outside of the model."""
    return f"outside_{number}"
