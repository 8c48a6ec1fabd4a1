"""Parse the user's overrides `key=value`, one by one, and report problems in the user's own words.

What the user asked for, in his own words.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, ValueNode
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.config import precision_words, registry
from harness.config.key_names import closest_key, leaves, names, with_values
from harness.core.problem import LEAVE_OUT, Fix, Problem, bare_key, spelled
from harness.core.serialization import DEEPEST

SIMILAR = 0.5
"""Similarity (`difflib`) above which a choice is suggested."""
FEW = 12
"""So many keys of a group are listed."""
ALL_KEYS = "python run.py --help all lists every key"
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", NoneType: "null"}
SYNTAX = frozenset(",'\"[](){}\\$")
"""What has a meaning for Hydra, in a value."""


@dataclass(frozen=True)
class Parsed:
    """The overrides that are well formed: choices of groups, and values of keys."""

    choices: list[Override]
    values: list[Override]


def quoted(key: str, value: str) -> str:
    """`key=value` for a text with any characters."""
    return f"{key}={spelled(value)}"


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Override:
    """The points of a sweep have most of their overrides in common."""
    return read(text, _parser())


def read(text: str, parser: OverridesParser) -> Override:
    """Raises HydraException, or ValueError for what would be too deep for the parser, which is recursive."""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > DEEPEST:
            raise ValueError(f"is nested more than {DEEPEST} levels deep")
    return parser.parse_override(_with_quotes(text))


def _with_quotes(text: str) -> str:
    """Hydra's grammar has ASCII letters alone, and no second equals sign: a value with these gets quotes, unless it has
    some, or is a list."""
    key, _, value = text.partition("=")
    needs = "=" in value or not value.isascii()
    return quoted(key, value) if needs and SYNTAX.isdisjoint(value) else text


_parser = functools.cache(OverridesParser.create)


def parse(
    texts: Sequence[str],
    options: Callable[[str], list[str]],
    groups: Iterable[str],
    unlisted: Callable[[Override], bool] = lambda override: False,
) -> tuple[Parsed, list[Problem]]:
    """Take the overrides apart; `options(group)` are the choices of one of the `groups`, others may be `unlisted`."""
    parsed, problems = Parsed([], []), []
    for text in texts:
        try:
            override = _parsed(text)
        except (HydraException, ValueError) as error:
            problems.append(
                Problem(text, None, f"cannot be read: {first_line(error)}", hint=_hint_at(text, options, groups))
            )
            continue
        problem = _form_problem(override)
        if problem is None and not unlisted(override):
            problem = _choice_problem(override, options, groups)
        if problem:
            problems.append(problem)
        else:
            (parsed.choices if override.key_or_group in groups else parsed.values).append(override)
    return parsed, problems


def _hint_at(text: str, options: Callable[[str], list[str]], groups: Iterable[str]) -> str:
    """What a word without a value was meant to be: a choice, or a key."""
    if text == "help":
        return "python run.py --help"
    if "=" in text:
        return ""
    of = [group for group in groups if text in options(group)]
    return " or ".join(f"{group}={text}" for group in of) or f"{text}=..."


def value_problem(config: DictConfig, override: Override) -> Problem | None:
    """Why the composed `config` does not take this value: no such key, or a wrong type."""
    key, value = override.key_or_group, override.value()
    parent, missing = _walk(config, key)
    if missing:
        return None if _in_dictionary(config, key) else _unknown_key(config, override, missing)
    if override.is_add() or override.is_force_add():
        return Problem(_key(override), _text(override), "is a key already and needs no +", ({key: value},))
    wanted = _hint(parent, key.rpartition(".")[2])
    if OmegaConf.is_dict(_now(config, key)) and not isinstance(value, dict):
        if is_dictionary(parent[key.rpartition(".")[2]]):
            return Problem(key, _text(override), "is not a dictionary", hint=f"{key}={{name: value}}")
        keys = [leaf for leaf in leaves(config) if leaf.startswith(f"{key}.")]
        return Problem(key, _text(override), f"is a group of keys: {', '.join(keys)}", hint=f"{keys[0]}=...")
    try:
        _try(config, parent, key, value)
        refused = wanted is bool and not isinstance(value, (bool, str))
    except OverflowError:  # a float of 400 digits
        refused = True
    except OmegaConfBaseException as error:
        if isinstance(value, dict) and OmegaConf.is_dict(_now(config, key)):
            name = error.full_key or key
            if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
                return Problem(name, None, "is not a key", hint=_known_key(name, config))
            return Problem(name, None, first_line(error))
        refused = True
    if not refused:
        return None
    now, message = _now(config, key), f"is not {described(wanted)}"
    if wanted is bool:
        meant = _nearest(_text(override), bool(now))
        return Problem(key, _text(override), message, ({key: meant}, {key: not meant}))
    if not OmegaConf.is_list(now):
        return Problem(key, _text(override), message, ({key: now},))
    return Problem(key, _text(override), message, ({key: list(now)},) if now else (), "" if now else f"{key}=[...]")


def _nearest(text: str, now: bool) -> bool:
    """What a text that is neither true nor false is most like; what holds `now` if it is like neither."""
    like = difflib.get_close_matches(text.lower(), ("true", "false"), n=1)
    return like[0] == "true" if like else now


def mistyped_interpolations(config: DictConfig) -> list[Problem]:
    """Return the problems of lists and groups that take the value of another key, ${...}, and get one of another type;
    OmegaConf sees to it that numbers and texts do not."""
    asking = [key for key, value in with_values(config) if isinstance(value, str) and "${" in value]
    content: Any = OmegaConf.to_container(config, resolve=True) if asking else {}
    found = []
    for key in asking:
        parent, name = _walk(config, key)[0], key.rpartition(".")[2]
        node: Any = parent._get_node(name)
        if isinstance(node, ValueNode) or not OmegaConf.is_interpolation(parent, name):
            continue
        value = functools.reduce(lambda group, part: group[part], key.split("."), content)
        try:
            _try(config, parent, key, value)
        except OmegaConfBaseException:
            message = f"takes the value of another key, which is not {described(_hint(parent, name))}"
            found.append(Problem(key, None, message))
    return found


def _now(config: DictConfig, key: str) -> Any:
    """The value of a key so far; None where an earlier override leads nowhere."""
    return OmegaConf.select(config, key, throw_on_resolution_failure=False)


def _unknown_key(config: DictConfig, override: Override, missing: str) -> Problem:
    """A key that does not exist: a fix with the one that was probably meant, if that takes the value."""
    key = override.key_or_group
    message, best = f"is not a key{_of(key, missing, config)}", closest_key(key, names(config))
    same = f"{best}={override.get_value_element_as_str()}"
    if not best or isinstance(override.value(), dict) or value_problem(config, _parsed(same)):
        return Problem(key, None, message, hint=_known_key(key, config))
    return Problem(key, None, message, ({best: override.value(), key: LEAVE_OUT},))


def _known_key(key: str, config: DictConfig) -> str:
    """A hint at the key that was probably meant, at the choices of its group that have it, or at all keys."""
    if best := closest_key(key, names(config)):
        sets_others = OmegaConf.is_dict(config.get(best)) and best not in registry.GROUPS  # batch is a prefix of keys
        return f"{best}.KEY=..., {ALL_KEYS}" if sets_others else f"{best}=..."
    group, _, rest = key.partition(".")
    first = rest.partition(".")[0]
    here = any(name.startswith(f"{group}.{first}.") for name in leaves(config))  # the choice itself has it
    choices = [] if here else having(group, first)
    if choices:
        return f"{group}={', '.join(choices)} {'has' if len(choices) == 1 else 'have'} it"
    return _keys_of(config, group)


def _keys_of(config: DictConfig, group: str) -> str:
    """A hint at the keys of a small group, else at all keys."""
    node = config.get(group)
    own = [str(name) for name in node if name != "name"] if OmegaConf.is_dict(node) else []
    return f"its keys are {', '.join(own)}" if 0 < len(own) <= FEW else ALL_KEYS


def having(group: str, name: str) -> list[str]:
    """The plug-ins of a group that have a key."""
    return sorted(plugin for (of, plugin), kind in registry.schemas().items() if of == group and name in _fields(kind))


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _try(config: DictConfig, parent: DictConfig, key: str, value: Any) -> None:
    """Give a copy the value, of as little as shows whether it is taken."""
    node: Any = parent._get_node(key.rpartition(".")[2])
    if isinstance(node, ValueNode):
        copy.copy(node)._set_value(value)
    else:
        OmegaConf.update(copy.deepcopy(config), key, value)


OF_SEVERAL = {"scale": "a sweep", "repeats": "a sweep or a race", "schemes": "a race"}
"""Keys that belong to several runs."""
HOW = {"a sweep": "-m +sweeps=...", "a sweep or a race": "-m", "a race": "mode=race"}


def described(hint: Any) -> str:
    """A type as a user knows it: "a whole number or null"."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(described(item) for item in get_args(hint))
    if get_origin(hint) is list:
        return "a list, each " + described(*get_args(hint))
    return WANTED.get(hint, f"a {getattr(hint, '__name__', hint)}")


def _form_problem(override: Override) -> Problem | None:
    """Return the problem of an override that no run accepts, whatever its configuration is."""
    key, typed = override.key_or_group, override.input_line or override.key_or_group
    message, hint = "", ""
    if not key:
        return Problem(typed, None, "has no key before =")
    if key == "sweeps":
        message, hint = "is a sweep, not one run", f"python run.py -m {typed}"
    elif key in OF_SEVERAL:
        message, hint = (
            f"is a key of {OF_SEVERAL[key]}, not of one run",
            f"python run.py {HOW[OF_SEVERAL[key]]} {typed}",
        )
    elif override.is_delete():
        message = "takes a key away, every run needs all of them"
    elif override.package is not None:
        message = "moves a group to another key, which is not possible here"
    elif override.is_hydra_override() or key == "hydra":
        message = "configures Hydra's own launcher, which is not used here"
    elif override.is_sweep_override():
        message = "gives several values, one run takes one"
        hint = f"python run.py -m {typed}, or {key}=[...] for a list"
    fixes: tuple[Fix, ...] = () if hint else ({_key(override): LEAVE_OUT},)
    return Problem(_key(override), _text(override) or None, message, fixes, hint) if message else None


def _choice_problem(override: Override, options: Callable[[str], list[str]], groups: Iterable[str]) -> Problem | None:
    key, value = override.key_or_group, _text(override)
    group = key.partition(".")[0]
    if group in groups and key == f"{group}.name":
        fixes: tuple[Fix, ...] = ({group: value},) if value in options(group) else ()
        return Problem(key, value, f"follows from {group}=...", fixes)
    if key not in groups:
        return None
    known = options(key)
    near = [value] if value in known else _near(key, value, known)
    fixes = tuple({key: name} for name in near)
    if override.is_add() or override.is_force_add():
        return Problem(_key(override), value, "is a group already and needs no +", fixes)
    if override.value() in known:
        return None
    return Problem(key, value, f"is not one of {', '.join(known)}", fixes)


def _near(group: str, value: str, known: list[str]) -> list[str]:
    if group == "precision":  # as words, fp8 and fp64 are similar
        meant = precision_words.meant(value, known)
        return [meant] if meant else []
    return difflib.get_close_matches(value, known, n=1, cutoff=SIMILAR)


def _key(override: Override) -> str:
    """The key as the user typed it: +steps, ~steps, engine@twin."""
    return (override.input_line or override.key_or_group).partition("=")[0]


def _text(override: Override) -> str:
    """The value as the user typed it."""
    return (override.input_line or "").partition("=")[2]


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


def is_dictionary(node: Any) -> bool:
    """Whether the schema says that a value is a dictionary, not a group of keys."""
    return isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict


def _in_dictionary(config: DictConfig, key: str) -> bool:
    """Whether a key is a name in a dictionary."""
    parts = key.split(".")
    return any(is_dictionary(_now(config, ".".join(parts[:count]))) for count in range(2, len(parts)))


def has(config: DictConfig, key: str) -> bool:
    """Whether a composed configuration has a key, or a group of keys."""
    return not _walk(config, key)[1]


def _of(key: str, missing: str, config: DictConfig) -> str:
    """Return the end of "is not a key": " of batch", or " of engine=single", if the key begins with a group."""
    before = key[: key.rindex(missing)].rstrip(".")
    chosen = OmegaConf.select(config, f"{before}.name") if before else None
    return (f" of {before}={chosen}" if chosen else f" of {before}") if before else ""


_hints = functools.cache(get_type_hints)


def _hint(parent: DictConfig, name: str) -> Any:
    kind = OmegaConf.get_type(parent)
    return _hints(kind).get(name, Any) if kind and is_dataclass(kind) else Any


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See "))]
    return lines[0] if lines else type(error).__name__


def choices(config: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Engine, model and cluster as the user chose them: unet_5_64 and not unet, which it configures.

    With a stored profile and no model, the model is the profile's.
    """
    chosen = dict(text.split("=", 1) for text in overrides if "=" in text)
    if config.profile:
        chosen.setdefault("model", Path(config.profile).stem)
    if ":" in chosen.get("model", ""):  # a callable of the user's, with its whole path
        chosen["model"] = config.model.name
    return {group: chosen.get(group, config[group].name) for group in ("engine", "model", "cluster")}


def title(config: DictConfig, overrides: Sequence[str]) -> str:
    """The run in a line: engine=gpipe model=unet_5_64 cluster=flat. A profile is made without an engine."""
    chosen = choices(config, overrides)
    if config.mode == "profile":
        del chosen["engine"]
    return " ".join(f"{group}={name}" for group, name in chosen.items() if (group, name) != ("cluster", "local"))


def value_of(overrides: Sequence[str], key: str) -> Any:
    """The value that `key` is given, +key=value counts, too. It must be given, and be readable."""
    return next(_parsed(text).value() for text in reversed(overrides) if bare_key(text) == key)


def given(overrides: Sequence[str], key: str) -> bool:
    """Whether the user typed `key`, or one below it: model=unet, model.size=64."""
    return any(text.startswith((f"{key}=", f"{key}.")) for text in overrides)
