"""`python run.py --help`: modes, groups with their choices and examples; read from conf/ and the sources.

`--help engine`, `--help mesh`: the keys of a group, or that begin so; `--help all`: every key with its meaning.
`python run.py engine=gpipe --help`: the keys of this choice.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from harness.cli.compose import CONF, read
from harness.config import registry
from harness.config.overrides import described
from harness.config.schema import Config
from harness.core.problem import CannotRun, Problem, bare_key, spelled
from harness.user_model.keys import HELP, HIDDEN, shared

USAGE = """\
python run.py [key=value ...]        plan, predict, train a few steps, report and record (mode=run)
python run.py -m [key=v1,v2 ...]     a sweep over every combination; +sweeps=NAME takes the points of sweeps/NAME.yaml,
                                     repeats=5 runs each point, or a race, with five seeds: mean and spread
python run.py --config-dir DIR [...] also read choices from DIR: DIR/cluster/NAME.yaml is cluster=NAME
python run.py --cfg job [...]        print the configuration and stop"""
MODES = """\
    mode=plan                       only plan and predict
    mode=simulate                   the same, and a step of it in a simulator, on a described cluster: cluster=p40x8
    mode=tune                       find the fastest scheme, mesh and micro-batches that fit, of all engines: engine=all
    mode=fit                        the memory of each scheme, with and without recomputation, in each precision
    mode=race                       train with several engines in turns, and rank them: engine=gpipe,ddp or engine=all;
                                    gpipe:key=value is of one of them, schemes=FILE.yaml lists runs with names
    mode=profile                    only measure or count a model's layers
    mode=calibrate                  time collectives among this machine's devices, and write a cluster file"""
EXAMPLES = """\
    python run.py engine=gpipe model=unet
    python run.py -m engine=single,gpipe,ddp,fsdp model=unet out=runs/four
    python run.py mode=simulate engine=gpipe model=unet_5_64 cluster=p40x8
    python run.py mode=tune engine=all model=gpt_24_1024 batch.size=64 cluster=dgx_a100_40 precision=mixed
    python run.py mode=race engine=single,gpipe,ddp model=gpt"""
MORE = """\
    python run.py --help engine     the choices of a group, with all their keys
    python run.py --help batch      keys of no group that begin so: batch, mesh, optimizer, launch, race, tune ...
    python run.py engine=gpipe --help   the keys of a choice, with the values that it gives them
    python run.py --help all        every choice and every key"""
ALL = "all"
OWN_MODEL = "or yours: model=net.py:build, what the function or class build of net.py returns; its parameters are keys"
USER_MODEL = "model=FILE.py:NAME, in addition to the parameters of NAME"
INDENT = 4
KEY_WIDTH = 30


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key with its default value, or a choice of a group (`default` is None), and what it means."""

    name: str
    meaning: str
    default: str | None = None


def text(overrides: Sequence[str] = ()) -> str:
    """A page, as wide as the terminal: of choices that are typed (engine=gpipe), or of words (engine, mesh, all), their
    keys alone; without both an overview.

    Raises CannotRun for choices, and words, that do not exist.
    """
    if chosen := [text for text in overrides if "=" in text and bare_key(text) in registry.GROUPS]:
        return "\n\n".join(_of_choices(chosen))
    if words := [text for text in overrides if "=" not in text]:
        return "\n\n".join(part for word in words for part in _about(word))
    usage = [USAGE, f"modes\n{MODES}", "\n".join(["choices", *_all_choices()])]
    return "\n\n".join([*usage, f"examples\n{EXAMPLES}", f"more\n{MORE}"])


def _all_choices() -> Iterator[str]:
    """Each group with its choice where none is typed, and the others."""
    config = read([])
    for group in registry.GROUPS:
        others = [one.name for one in _choices(group) if one.name != config[group].name]
        own = [OWN_MODEL] if group == "model" else []
        yield _line(Entry(f"{group}={config[group].name}", ", ".join([*others, *own])))


def _about(word: str) -> Iterator[str]:
    """The keys of a group with its choices, those that begin with the word, or all. Raises CannotRun for another."""
    found = False
    if word == ALL:
        yield USAGE
    for group, choices, owned in groups():
        if whole := word in (group, ALL):
            yield f"{group}=..."
            yield "\n".join(map(_line, choices))
        for owner, entries in owned.items():
            if shown := [one for one in entries if whole or _begins(one, word)]:
                yield "\n".join([f"  with {owner}", *map(_line, shown)])
                found = True
    if shown := [one for one in other_keys() if word == ALL or _begins(one, word)]:
        yield "other keys"
        yield "\n".join(map(_line, shown))
    elif not found:
        fixes = [f"{group}={word} --help" for group in registry.GROUPS if word in map(_name, _choices(group))]
        message = f"is no group or key: {', '.join(dict.fromkeys((*registry.GROUPS, *map(_first, other_keys()))))}"
        hint = f"python run.py {fixes[0] if fixes else f'--help {ALL}'}"
        raise CannotRun([Problem("--help", word, message, hint=hint)], "this page")


def _begins(entry: Entry, word: str) -> bool:
    return entry.name == word or entry.name.startswith(f"{word}.")


def _name(entry: Entry) -> str:
    return entry.name


def _first(entry: Entry) -> str:
    return entry.name.partition(".")[0]


def _of_choices(chosen: Sequence[str]) -> Iterator[str]:
    """The keys of each choice with the values that it gives them; a line for each group of which none is typed."""
    config = read(chosen)
    typed = {bare_key(text): text.partition("=")[2] for text in chosen}
    for group, name in typed.items():
        meaning = next((one.meaning for one in _choices(group) if one.name == name), "")
        if registry.is_user_model(group, config[group]):
            schema: Any = OmegaConf.get_type(config[group])
            meaning = schema.__doc__ or ""
        else:
            schema = registry.schemas()[group, group if group in registry.SCHEMAS else config[group].name]
        entries = (_given(entry, config) for entry in _entries(schema, f"{group}."))
        yield "\n".join([_line(Entry(f"{group}={name}", meaning), 0), *map(_line, entries)])
    others = (_other_choices(group, config[group].name) for group in registry.GROUPS if group not in typed)
    yield "\n".join(["as it is, or another choice:", *others])
    yield MORE


def _given(entry: Entry, config: DictConfig) -> Entry:
    """A key with its value in a configuration."""
    try:
        value = OmegaConf.select(config, entry.name, throw_on_missing=True)
    except MissingMandatoryValue:
        return dataclasses.replace(entry, default="...")
    shown = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
    return dataclasses.replace(entry, default=spelled(shown))


def _other_choices(group: str, name: str) -> str:
    others = ", ".join(one.name for one in _choices(group) if one.name != name)
    shown = textwrap.shorten(others, _width() - INDENT - KEY_WIDTH - 2, placeholder=" ...")
    return _line(Entry(f"{group}={name}", shown))


def groups() -> Iterator[tuple[str, list[Entry], dict[str, list[Entry]]]]:
    """Each group, its choices, and the keys of each choice that has some: {"engine=gpipe": keys}."""
    for group in registry.GROUPS:
        owned = {
            f"{group}={name}" if name != group else f"any {group}": entries
            for (owner, name), config in registry.schemas().items()
            if owner == group and (entries := list(_entries(config, f"{group}.")))
        }
        if group == "model":
            owned[USER_MODEL] = list(_entries(dataclasses.make_dataclass("Shared", shared()), "model."))
        yield group, list(_choices(group)), owned


def other_keys() -> list[Entry]:
    """The keys of no group."""
    return list(_entries(Config, ""))


def keys(config: type, prefix: str) -> Iterator[str]:
    """A line for each key below `prefix`. Groups have their own; `name` follows from a group's choice."""
    return map(_line, _entries(config, prefix))


def _choices(group: str) -> Iterator[Entry]:
    """Each choice with the comment that its file begins with."""
    for path in sorted((CONF / group).glob("[!_]*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        meaning = next(line.lstrip("# ") for line in lines if not line.startswith("# @"))  # Hydra's header
        yield Entry(path.stem, meaning)


def _entries(config: type, prefix: str) -> Iterator[Entry]:
    hints, meanings = get_type_hints(config), _meanings(config)
    hidden = {"defaults", *(field.name for field in dataclasses.fields(config) if HIDDEN in field.metadata)}
    hidden |= {"name"} if config in registry.schemas().values() else set()
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        default = field.default_factory() if callable(field.default_factory) else field.default
        if dataclasses.is_dataclass(hint):
            yield from _entries(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif field.name not in hidden and (default != MISSING or HELP in field.metadata):
            kind = "" if hint is str else f" ({described(hint)})"
            yield Entry(f"{prefix}{field.name}", (meanings.get(field.name, "") + kind).strip(), spelled(default))


def _meanings(config: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, or the text that its fields have themselves."""
    if given := {one.name: one.metadata[HELP] for one in dataclasses.fields(config) if HELP in one.metadata}:
        return given
    body: list[Any] = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _width() -> int:
    return max(60, min(shutil.get_terminal_size((120, 24)).columns, 120))


def _line(entry: Entry, indent: int = INDENT) -> str:
    """A name and its meaning, on the same line or below."""
    name = entry.name if entry.default is None else f"{entry.name}={entry.default}"
    lines = textwrap.wrap(entry.meaning, _width() - INDENT - KEY_WIDTH - 2) or [""]
    margin = " " * (INDENT + KEY_WIDTH + 2)
    column = INDENT + KEY_WIDTH - indent
    if len(name) > column:
        return "\n".join([" " * indent + name, *(margin + line for line in lines)])
    return "\n".join([f"{'':{indent}}{name:<{column}}  {lines[0]}".rstrip(), *(margin + line for line in lines[1:])])
