"""The signature of a user's callable by importing its file, and a call with the keys that follow from it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harness.user_model import docstring
from harness.user_model.kinds import NOTHING, argument, kind_of
from harness.user_model.load import load, parameters_of, telling
from harness.user_model.parameters import Parameter, Signature, parameter
from harness.user_model.reference import Reference


def of(place: Reference) -> Signature:
    """The signature of what a reference names, by importing it. Raises CannotRun as `load.load`."""
    function = load(place)
    with telling(place, "when its signature is read"):
        parameters = parameters_of(function)
    texts = [function.__doc__]
    texts += [function.__init__.__doc__] if inspect.isclass(function) else []
    described = {name: text for one in texts for name, text in docstring.parameters(one).items()}
    return Signature(tuple(_parameters(function, parameters, described)), docstring.first_line(texts[0]))


def _parameters(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], described: Mapping[str, str]
) -> Iterator[Parameter]:
    hints = hints_of(function)
    for one in parameters:
        required = one.default is NOTHING
        hint = hints.get(one.name, one.annotation)
        kind = None if one.kind is one.POSITIONAL_ONLY else kind_of(hint, one.default)
        written = "" if one.annotation is NOTHING else inspect.formatannotation(one.annotation)
        yield parameter(one.name, kind, one.default, required, written, described.get(one.name, ""))


def call(place: Reference, settings: Mapping[str, Any]) -> Any:
    """Call what a reference names with those of the keys that are its parameters. Raises CannotRun for what it
    raises."""
    function = load(place)
    hints, parameters = hints_of(function), inspect.signature(function).parameters
    arguments = {}
    for key in of(place).keys:
        one = parameters[key.name]
        arguments[key.name] = argument(settings[key.name], hints.get(key.name, one.annotation), one.default)
    with telling(place, f"when it is called with {_given(arguments)}" if arguments else "when it is called"):
        return function(**arguments)


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the parameters of a function or class, without quotes; those that cannot be found are left
    out."""
    target: Any = function.__init__ if inspect.isclass(function) else inspect.unwrap(function)
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _given(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items())
