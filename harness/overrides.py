"""What the user typed: `key=value`, one by one, with what is wrong with each in the user's own words."""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, ValueNode
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.problem import Problem

SHORT = 3
"""Letters of a key that is cut short, at least."""
ALIKE = 0.5
"""How alike a choice must be that is offered (`difflib`): as fp16 is to float16."""
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


@dataclass(frozen=True)
class Parsed:
    """The overrides that are well formed: choices of groups, and values of keys."""

    choices: list[Override]
    values: list[Override]


def quoted(key: str, value: str) -> str:
    """`key=value` for a text with any characters."""
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Override:
    """The points of a sweep have most of their overrides in common."""
    return _parser().parse_override(text)


_parser = functools.cache(OverridesParser.create)


def parse(
    texts: Sequence[str], options: Callable[[str], list[str]], groups: Iterable[str]
) -> tuple[Parsed, list[Problem]]:
    """Take the overrides apart; `options(group)` are the choices of one of the `groups`."""
    parsed, problems = Parsed([], []), []
    for text in texts:
        try:
            override = _parsed(text)
        except (HydraException, ValueError) as error:
            problems.append(Problem(text, f"cannot be read: {first_line(error)}", _repaired(text)))
            continue
        problem = _form_problem(override) or _choice_problem(override, options, groups)
        if problem:
            problems.append(problem)
        else:
            (parsed.choices if override.key_or_group in groups else parsed.values).append(override)
    return parsed, problems


def value_problem(config: DictConfig, override: Override) -> Problem | None:
    """Why the composed `config` does not take this value: no such key, or a wrong type."""
    key, value = override.key_or_group, override.get_value_element_as_str()
    parent, missing = _walk(config, key)
    if missing:
        what = f"is not a key{_of(key, missing)}"
        return Problem(override.get_key_element(), what, suggestion(key, list(leaves(config))))
    if override.is_add() or override.is_force_add():
        return Problem(override.get_key_element(), "is a key already", f"{key}={value}")
    wanted = _hint(parent, key.rpartition(".")[2])
    if OmegaConf.is_dict(OmegaConf.select(config, key)) and not isinstance(override.value(), dict):
        keys = ", ".join(leaf for leaf in leaves(config) if leaf.startswith(f"{key}."))
        return Problem(f"{key} {value}", f"is a group of keys: {keys}", f"{keys.partition(',')[0]}=...")
    try:
        _try(config, parent, key, override.value())
        refused = wanted is bool and not isinstance(override.value(), (bool, str))
    except OmegaConfBaseException as error:
        if isinstance(override.value(), dict):
            unknown = isinstance(error, (ConfigKeyError, ConfigAttributeError))
            name = error.full_key or key
            if unknown:
                return Problem(name, "is not a key", suggestion(name, list(leaves(config))))
            return Problem(name, first_line(error))
        refused = True
    if not refused:
        return None
    mend = f"{key}={shown(OmegaConf.select(config, key))}"
    return Problem(f"{key} {value}".strip(), f"is not {described(wanted)}", mend)


def _try(config: DictConfig, parent: DictConfig, key: str, value: Any) -> None:
    """Give a copy the value, of as little as shows whether it is taken."""
    node: Any = parent._get_node(key.rpartition(".")[2])
    if isinstance(node, ValueNode):
        copy.copy(node)._set_value(value)
    else:
        OmegaConf.update(copy.deepcopy(config), key, value)


def suggestion(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant, ready to type; or where all keys are listed.

    The last part counts most (model.chanels, micro_batches), and may be cut short (mesh.pipe); of several keys that end
    alike, the most similar one.
    """
    lasts = {name: name.rpartition(".")[2] for name in known}
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(last, lasts.values(), n=1, cutoff=0.75)
    near = near or [one for one in lasts.values() if len(last) >= SHORT and one.startswith(last)]
    alike = [name for name, last in lasts.items() if last in near]
    best = difflib.get_close_matches(key, alike, n=1, cutoff=0)
    return f"{best[0]}=..." if best else "python run.py --help lists every key"


def leaves(config: DictConfig) -> Iterator[str]:
    """Every key of a composed configuration, in full: batch.size, ..."""

    def below(node: dict[Any, Any], prefix: str) -> Iterator[str]:
        for name, child in node.items():
            if isinstance(child, dict) and child:
                yield from below(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    return below(content, "")


def described(hint: Any) -> str:
    """A type as a user knows it: "a whole number or null"."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(described(item) for item in get_args(hint))
    if get_origin(hint) is list:
        return "a list, each " + described(*get_args(hint))
    return WANTED.get(hint, f"a {getattr(hint, '__name__', hint)}")


def _form_problem(override: Override) -> Problem | None:
    """What no run accepts, whatever its configuration is."""
    key = override.key_or_group
    typed = override.input_line or key
    if not key:
        return Problem(typed, "has no key before =")
    if key == "sweeps":
        return Problem(typed, "is a sweep, not one run", f"python run.py -m {typed}")
    if override.is_delete():
        return Problem(typed, "takes a key away, every run needs all of them")
    if override.package is not None:
        return Problem(typed, "moves a group to another key, which is not possible here")
    if override.is_hydra_override() or key == "hydra":
        return Problem(typed, "configures Hydra's own launcher, which is not used here")
    if override.is_sweep_override():
        mend = f"python run.py -m {typed}, or {key}=[...] for a list"
        return Problem(typed, "gives several values, one run takes one", mend)
    return None


def _choice_problem(override: Override, options: Callable[[str], list[str]], groups: Iterable[str]) -> Problem | None:
    key, value = override.key_or_group, override.get_value_element_as_str()
    if key.partition(".")[0] in groups and key.endswith(".name") and key.count(".") == 1:
        group = key.partition(".")[0]
        return Problem(f"{key} {value}", f"follows from {group}=...", f"{group}={value}")
    if key not in groups:
        return None
    known = options(key)
    given = f"{override.get_key_element()} {value}".strip()
    if override.is_add() or override.is_force_add():
        return Problem(given, "has its place already", f"{key}={value}")
    if override.value() in known:
        return None
    near = difflib.get_close_matches(value, known, n=1, cutoff=ALIKE)
    return Problem(given, f"is not one of {', '.join(known)}", f"{key}={near[0]}" if near else "")


def _walk(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    """The node that holds `key`, and the first part of `key` that is not there ("" if all are)."""
    node: Any = config
    parts = key.split(".")
    for part in parts[:-1]:
        if not isinstance(node, DictConfig) or part not in node:
            return config, part
        node = node[part]
    if not isinstance(node, DictConfig) or parts[-1] not in node.keys():  # noqa: SIM118 ("in" says no for a null)
        return config, parts[-1]
    return node, ""


def _of(key: str, missing: str) -> str:
    """What follows "is not a key": of batch, where the key begins well."""
    before = key[: key.rindex(missing)].rstrip(".")
    return f" of {before}" if before else ""


_hints = functools.cache(get_type_hints)


def _hint(parent: DictConfig, name: str) -> Any:
    kind = OmegaConf.get_type(parent)
    return _hints(kind).get(name, Any) if kind and is_dataclass(kind) else Any


def shown(value: Any) -> str:
    """A value as it is typed."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _repaired(text: str) -> str:
    return "" if "=" in text else f"{text}=..."


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
    return lines[0] if lines else type(error).__name__
