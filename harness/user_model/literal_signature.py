"""The signature of a function or class by its source alone, where that is sure to be the one that Python will see.

    from typing import Literal
    def build(width: int = 64, act: Literal["relu", "gelu"] = "relu"): ...     read here

Left to an import: a name that is bound twice or by `import *`, decorators, annotations of other names, computed
defaults, classes without an `__init__` of their own.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.user_model import docstring
from harness.user_model.kinds import NOTHING, kind_of
from harness.user_model.parameters import Signature, parameter

Function = ast.FunctionDef | ast.AsyncFunctionDef
BUILTIN = ("int", "float", "bool", "str", "list", "tuple")
MODULES: dict[str, Any] = {"typing": typing, "typing_extensions": typing, "collections.abc": collections.abc}
KNOWN = {
    "typing": (
        "Any",
        "Annotated",
        "Collection",
        "Iterable",
        "List",
        "Literal",
        "Optional",
        "Sequence",
        "Tuple",
        "Union",
    ),
    "collections.abc": ("Collection", "Iterable", "Sequence"),
}
KNOWN["typing_extensions"] = KNOWN["typing"]
NODES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.Constant, ast.BinOp, ast.BitOr, ast.Load, ast.UnaryOp)


class _NotLiteral(Exception):
    """Only an import can say what this is."""


def of(path: Path, name: str) -> Signature | None:
    """The signature of `name` at the top level of a file; None if an import must say it."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        bound = Counter(_bound(tree.body))
        if bound[name] != 1 or "*" in bound or any(name in names for names in _changed(tree)):
            return None
        (found,) = [one for one in tree.body if isinstance(one, Function | ast.ClassDef) and one.name == name]
        return _signature(found, _names(tree, bound))
    except (SyntaxError, ValueError, RecursionError, OSError, _NotLiteral):
        return None


def _signature(found: Function | ast.ClassDef, names: dict[str, Any]) -> Signature:
    texts = [ast.get_docstring(found)]
    function = _init(found) if isinstance(found, ast.ClassDef) else found
    if found.decorator_list or function.decorator_list:
        raise _NotLiteral
    texts += [ast.get_docstring(function)] if function is not found else []
    described = {name: text for one in texts for name, text in docstring.parameters(one).items()}
    arguments = list(_arguments(function.args))[1 if function is not found else 0 :]
    parameters = []
    for argument, default in arguments:
        written = "" if argument.annotation is None else ast.unparse(argument.annotation)
        hint = NOTHING if argument.annotation is None else _evaluated(argument.annotation, names)
        value = NOTHING if default is None else ast.literal_eval(default)
        text = described.get(argument.arg, "")
        parameters.append(parameter(argument.arg, kind_of(hint, value), value, default is None, written, text))
    return Signature(tuple(parameters), docstring.first_line(texts[0]))


def _init(found: ast.ClassDef) -> ast.FunctionDef:
    own = [one for one in found.body if isinstance(one, ast.FunctionDef)]
    inits = [one for one in own if one.name == "__init__"]
    if found.keywords or len(inits) != 1 or Counter(_bound(found.body))["__init__"] != 1:
        raise _NotLiteral
    if any(one.name in ("__new__", "__init_subclass__") for one in own):
        raise _NotLiteral
    return inits[0]


def _arguments(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Each parameter that can be given by its name, with its default."""
    if arguments.posonlyargs:
        raise _NotLiteral
    missing = len(arguments.args) - len(arguments.defaults)
    yield from zip(arguments.args, [*[None] * missing, *arguments.defaults], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    """The type that an annotation is, if it has known names alone."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    for one in ast.walk(node):
        known = isinstance(one, NODES) and (not isinstance(one, ast.Name) or one.id in names)
        if not known or (isinstance(one, ast.Attribute) and one.attr not in KNOWN["typing"]):
            raise _NotLiteral
    if _has_inner_quotes(node):
        raise _NotLiteral
    try:
        return eval(compile(ast.Expression(node), "annotation", "eval"), {"__builtins__": {}}, names)
    except (TypeError, AttributeError, NameError) as error:
        raise _NotLiteral from error


def _has_inner_quotes(node: ast.expr) -> bool:
    """Whether a part of an annotation is quoted: list["int"]; the texts of a Literal are none."""
    literals = [one for one in ast.walk(node) if isinstance(one, ast.Subscript) and "Literal" in ast.unparse(one.value)]
    texts = {id(text) for one in literals for text in ast.walk(one)}
    inner = (one for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return any(id(one) not in texts for one in inner)


def _names(tree: ast.Module, bound: Counter[str]) -> dict[str, Any]:
    """The names of types that mean in this file what they always do."""
    found: dict[str, Any] = {name: getattr(builtins, name) for name in BUILTIN if not bound[name]}
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {one.asname or one.name: MODULES[one.name] for one in node.names if one.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES and not node.level:
            known = [one for one in node.names if one.name in KNOWN[node.module]]
            found |= {one.asname or one.name: getattr(MODULES[node.module], one.name) for one in known}
    return {name: value for name, value in found.items() if bound[name] <= 1 and name.isidentifier()}


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Every name that statements bind where they stand, once for each time; "*" for `import *`."""
    left: list[ast.AST] = list(body)
    while left:
        node = left.pop()
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
            left += node.decorator_list
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name).partition(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        if not isinstance(node, ast.Lambda):
            left += ast.iter_child_nodes(node)


def _changed(tree: ast.Module) -> Iterator[list[str]]:
    """Names that functions declare global, or whose attributes are set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.names
        elif (
            isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name)
        ):
            yield [node.value.id]
