"""Compose the command line to one complete, checked configuration, through Hydra. Does not import torch.

Other names that an engine has for degrees of the mesh, as its paper calls them. Does not import torch.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationValidationError, MissingMandatoryValue, OmegaConfBaseException

from harness.checks import configuration, micro_batches, values
from harness.checks.configuration import Expected
from harness.cli import choice_files, suggestions, user_models
from harness.cli.choice_files import CONF
from harness.config import cluster_parts, registry
from harness.config.key_names import closest_key, leaves, names
from harness.config.overrides import WANTED, Parsed, is_dictionary, mistyped_interpolations, parse, value_problem
from harness.core.problem import LEAVE_OUT, CannotRun, Fix, Problem, bare_key, refuse
from harness.host import devices

TITLE_WIDTH = 100
NO_KEY = "is not a key"
WORDS = (
    (r"Key '(.*)' not in '\w+'.*", NO_KEY),
    (r"Merge error: (\w+) is not a subclass of (\w+)\. value: (.*)", r"\3 stands where a group of keys belongs"),
    (r"Value '(.*)' of type '\w+' could not be converted to (\w+).*", r"\1 is not \2"),
    (r"(?<=is not )Integer$", WANTED[int]),
    (r"(?<=is not )Float$", WANTED[float]),
    (r"(?<=is not )Boolean$", WANTED[bool]),
    (r"(?<=is not )String$", WANTED[str]),
)
"""What OmegaConf says of a YAML file, and how it is said here."""
OTHER_TYPE = "takes the value of another key, which has one of another type"


class _Root(SearchPathPlugin):
    """Puts the repository root on Hydra's search path: `+sweeps=NAME` is sweeps/NAME.yaml; then the user's folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("regatta", f"file://{registry.ROOT}")
        if folder := registry.further():
            search_path.append("further", f"file://{folder}")


_CHOICES: dict[tuple[str, ...], list[str]] = {}


def compose(overrides: Sequence[str], expected: Expected | None = None) -> DictConfig:
    """The configuration of one run, with all interpolations resolved; `expected` is the job that it will run in.

    Raises CannotRun with all problems at once: overrides that cannot be read, unknown keys, wrong types, unknown
    choices, numbers that no run can have.
    """
    config, problems = _composed_and_checked(overrides, expected)
    found = micro_batches.in_given_keys(_improved(problems, overrides, config, expected), config)
    refuse(found, title(overrides))
    OmegaConf.resolve(config)
    return config


def _composed_and_checked(
    overrides: Sequence[str], expected: Expected | None = None
) -> tuple[DictConfig, list[Problem]]:
    """The configuration, and all that is wrong with it. What cluster and engine refuse is asked if anything else is."""
    config, parsed, problems = _taken(overrides)
    unresolved = _unresolved(config)
    if not unresolved:
        typed = {override.key_or_group for override in parsed.values}
        cluster_parts.follow_keys(config.cluster, config.precision.tf32, typed)
        problems += follow(config)
        _for_gpus(config, typed, expected)
        if config.batch.micro_batch_size is not None:
            with configuration.expecting(config, expected):
                problems += micro_batches.follow(config, micro_batches.COUNT in typed)
    readable = not problems
    known = {problem.key for problem in problems}  # those have their defaults, which nobody typed
    problems += unresolved or [problem for problem in values.problems(config) if problem.key not in known]
    if problems and readable and not unresolved:
        reported = {problem.key for problem in problems}
        further = configuration.request_problems(config, overrides, expected)
        problems += [problem for problem in further if problem.key not in reported]
    return config, problems


def _for_gpus(config: DictConfig, typed: Set[str], expected: Expected | None) -> None:
    """Set the keys of the engine that nobody has typed, and that are others by default on this machine's GPUs."""
    keys = {key: value for key, value in registry.on_gpus(config.engine.name).items() if f"engine.{key}" not in typed}
    if not keys or config.cluster.name != "local":
        return
    with configuration.expecting(config, expected):
        kind = devices.detect(config.cluster.device).kind
    for key, value in keys.items() if kind == "cuda" else ():
        config.engine[key] = value


def _improved(
    problems: list[Problem], overrides: Sequence[str], config: DictConfig, expected: Expected | None = None
) -> list[Problem]:
    """The problems with suggestions for names of other frameworks, which are tried in the place of what was typed."""

    def examine(texts: Sequence[str]) -> tuple[DictConfig, list[Problem]]:
        config, found = _composed_and_checked(texts, expected)
        return config, found or configuration.request_problems(config, texts, expected)

    if not problems:
        return []
    with session() as loader:
        known = {group: choices(loader, group) for group in registry.GROUPS}
    return suggestions.improve(problems, overrides, config, known, examine)


def mistyped(overrides: Sequence[str]) -> list[Problem]:
    """Return the problems of overrides that no configuration accepts: unknown keys and choices, wrong types, wrong
    syntax."""
    try:
        read(overrides)
    except CannotRun as error:
        return list(error.problems)
    return []


def read(overrides: Sequence[str]) -> DictConfig:
    """The configuration, whose values no run may have. Raises CannotRun for what is `mistyped`."""
    config, _, problems = _taken(overrides)
    refuse(_improved(problems, overrides, config), title(overrides))
    return config


def _taken(overrides: Sequence[str]) -> tuple[DictConfig, Parsed, list[Problem]]:
    """The configuration with all that can be taken of the overrides, and what is wrong with the others."""
    with session() as loader:
        parsed, problems = parse(overrides, functools.partial(choices, loader), registry.GROUPS, user_models.is_named)
        own, others = _user_model(parsed.choices, problems)
        config: DictConfig = pickle.loads(_composed(tuple(choice.input_line or "" for choice in others)))
    wrong = {bare_key(problem.key) for problem in problems} & {*registry.GROUPS}
    if own is not None:
        config.model = own
    elif len(others) < len(parsed.choices):
        wrong.add("model")
    for override in parsed.values:
        if override.key_or_group.partition(".")[0] in wrong:
            continue  # a key of a choice that does not exist
        problem = value_problem(config, override)
        if problem:
            problems.append(problem)
        else:
            OmegaConf.update(config, override.key_or_group, override.value())
    return config, parsed, problems


def _user_model(chosen: Sequence[Override], problems: list[Problem]) -> tuple[DictConfig | None, list[Override]]:
    """The part `model` of a model of the user's own, if one is chosen, and the choices that are Hydra's; what is wrong
    with it is added to the problems."""
    models = [choice for choice in chosen if choice.key_or_group == "model"]
    try:
        found = user_models.chosen(str(models[-1].value()), folders()) if models else None
        if found is None:
            return None, list(chosen)
        own = user_models.node(found)
    except CannotRun as error:
        problems += error.problems
        own = None
    return own, [choice for choice in chosen if choice not in models]


def folders() -> list[Path]:
    """The folders of choices: that of this project, and the user's."""
    return [CONF, *map(Path, filter(None, [registry.further()]))]


def search(folder: str) -> None:
    """Take choices from `folder`, too, after those of conf/: FOLDER/cluster/NAME.yaml is cluster=NAME.

    It holds for this process and those that it starts. Raises CannotRun where there is no such folder.
    """
    if not os.path.isdir(folder):  # Path.is_dir raises for one that is too long
        raise CannotRun([Problem("--config-dir", folder, "is not a folder")])
    os.environ[registry.FURTHER] = str(Path(folder).resolve())


@contextmanager
def session() -> Iterator[ConfigLoader]:
    """Hydra, ready to compose; yields what knows the groups and their choices.

    A program that uses Hydra itself, and calls `harness.race`, has its own state of Hydra again after that.
    """
    _set_up()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(CONF), version_base=None):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer


def choices(loader: ConfigLoader, group: str) -> list[str]:
    """The choices of a group; names that begin with _ are schemas. Looked up once: the points of a sweep share them."""
    key = (group, str(registry.ROOT), registry.further() or "")
    if key not in _CHOICES:
        there = (source for source in loader.get_sources() if source.is_group(group))
        found = {name for source in there for name in source.list(group, ObjectType.CONFIG)}
        _CHOICES[key] = sorted(name for name in found if not name.startswith("_"))
    return _CHOICES[key]


def title(overrides: Sequence[str]) -> str:
    """Return the user's command, if it fits on a line."""
    typed = " ".join(overrides)
    return typed if 0 < len(typed) <= TITLE_WIDTH else "this run"


@functools.cache
def _set_up() -> None:
    registry.register()
    Plugins.instance().register(_Root)


@functools.lru_cache(maxsize=64)
def _composed(choices: tuple[str, ...]) -> bytes:
    """Every key with its default, for these choices, pickled: the points of a sweep share them, each has its own copy.

    Raises CannotRun where the files in conf/, or in the user's folder, do not fit together.
    """
    typed = dict(text.partition("=")[::2] for text in choices)
    places = folders()
    for group, name in typed.items():
        choice_files.check_choice(group, name, places)
    try:
        config = hydra.compose("config", list(choices))
    except (HydraException, OmegaConfBaseException) as error:
        reason = _reason(f"{error.__cause__ or error}".partition("\n\n")[0])
        paths = (choice_files.find(group, name, places[1:]) for group, name in typed.items())
        where = ", ".join(map(str, filter(None, paths))) or str(CONF)
        reason = " ".join(reason.split())
        raise CannotRun([Problem(where, None, reason, hint=_meant(reason, choices))]) from error
    for key in sorted({key for group, name in typed.items() for key in choice_files.missing(group, name, places)}):
        OmegaConf.update(config, key, "???")
    refuse([problem for group in registry.GROUPS if (problem := _other_schema(config, group, typed.get(group)))])
    _open_dictionaries(config)
    return pickle.dumps(config)


def _meant(reason: str, choices: tuple[str, ...]) -> str:
    """The key that a file probably means by one that is none, in a group whose choices all have the same keys."""
    key, _, message = reason.partition(" ")
    group = key.partition(".")[0]
    others = tuple(text for text in choices if text.partition("=")[0] != group)
    if message != NO_KEY or group not in registry.SCHEMAS or others == choices:
        return ""
    with suppress(CannotRun):
        known = names(pickle.loads(_composed(others)))
        return closest_key(key, [name for name in known if name.startswith(f"{group}.")])
    return ""


def _open_dictionaries(node: DictConfig) -> None:
    """Let values whose type is a dictionary take any name, below all other keys, which are as they are."""
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            if is_dictionary(child):
                OmegaConf.set_struct(child, False)
            elif not (child._is_none() or child._is_missing() or child._is_interpolation()):
                _open_dictionaries(child)


def _reason(text: str) -> str:
    """What OmegaConf says, in this project's words and with the key in front."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if not line.startswith(("In '", "full_key:", "object_type=", "reference_type="))]
    keys = [line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")]
    reason = " ".join([*keys, *said])
    for pattern, words in WORDS:
        reason = re.sub(pattern, words, reason)
    return reason


def _other_schema(config: DictConfig, group: str, name: str | None) -> Problem | None:
    """A choice whose keys are not where its group's are, that has no name, or that says to be another plug-in."""
    node = config._get_node(group)
    kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    owners = [plugin for (owner, plugin), schema in registry.schemas().items() if owner == group and schema is kind]
    if not owners:
        return Problem(group, name, "has no schema of its group", hint=choice_files.example(group))
    own = owners[0]
    typed: Any = OmegaConf.to_container(node)  # a name that follows from another key is none
    if typed.get("name") == "???":
        return Problem(group, name, "has no name", hint=f"name: {name if group in registry.SCHEMAS else own}")
    if group in registry.SCHEMAS or typed.get("name") == own:
        return None
    return Problem(group, name, f"has another name than {own}, whose keys it has", hint=f"name: {own}")


def _unresolved(config: DictConfig) -> list[Problem]:
    """Keys without a value, and ${...} that lead nowhere, or to a value of another type."""
    typed = str(OmegaConf.to_container(config, resolve=False))
    if "${" not in typed and "???" not in typed:
        return []
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        return mistyped_interpolations(config)
    except OmegaConfBaseException as error:
        wrong = isinstance(error, InterpolationValidationError)
        first = Problem(str(error.full_key), None, OTHER_TYPE if wrong else f"{error}".partition("\n")[0])
    problems = []
    for key in leaves(config):
        try:
            OmegaConf.select(config, key, throw_on_missing=True)
        except MissingMandatoryValue:
            problems.append(Problem(key, None, "needs a value", hint=f"{key}=..."))
        except InterpolationValidationError:
            problems.append(Problem(key, None, OTHER_TYPE))
        except OmegaConfBaseException as error:
            problems.append(Problem(key, None, str(error).partition("\n")[0]))
    return problems or [first]  # in a list: its items are no keys


def follow(config: DictConfig) -> list[Problem]:
    """Write engine.NAME into mesh.DEGREE for each of the engine's `DEGREES` that is given; a problem for two numbers.

    `mesh.*` is the truth: nothing else reads the other names.
    """
    found = []
    schema = registry.schemas().get(("engine", config.engine.name))
    for name, degree in getattr(schema, "DEGREES", {}).items():
        given, there = config.engine[name], config.mesh[degree]
        if given is not None and there is not None and given != there:
            message = f"is another name of mesh.{degree}, which is {there}"
            fixes: tuple[Fix, ...] = ({f"engine.{name}": there}, {f"engine.{name}": LEAVE_OUT})
            found.append(Problem(f"engine.{name}", given, message, fixes))
        elif given is not None:
            config.mesh[degree] = given
    return found
