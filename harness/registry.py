"""Finds engines, planners, models, data sets and trackers by scanning their folders: nothing lists their names.

A plug-in NAME is a module NAME.py or a package NAME/ with a config.py. Either holds a dataclass `Config` and a
function `build(config, ...)`, and can be imported without torch.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from harness.config import Config
from harness.problem import CannotRun, Problem

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "engine": "engines",
    "planner": "planners",
    "model": "models",
    "data": "models/data",
    "tracker": "harness/trackers",
}
SCHEMAS = {"cluster": ("harness.clusters", "ClusterConfig"), "precision": ("harness.precision", "PrecisionConfig")}
"""Groups with one dataclass for all their choices."""


@dataclass(frozen=True)
class Plugin:
    """One choice of a group: `module` (a dotted name) at `path` holds its Config and its build."""

    group: str
    name: str
    module: str
    path: Path


def scan(root: Path = ROOT) -> list[Plugin]:
    """Every plug-in below `root`, by group and name. Reads the sources and imports nothing.

    Raises CannotRun for a source that Python cannot read, or that has a Config and no build.
    """
    found = [_plugin(group, path, root) for group, folder in FOLDERS.items() for path in _candidates(root, folder)]
    return [plugin for plugin in found if plugin is not None]


@functools.cache
def register() -> None:
    """Put every Config into Hydra's ConfigStore, as `_NAME` of its group, and the root as `_config`."""
    store = ConfigStore.instance()
    for (group, name), config in schemas().items():
        store.store(f"_{name}", config, group=group)
    store.store("_config", Config)


@functools.cache
def schemas() -> dict[tuple[str, str], type]:
    """The dataclass of every (group, name); a group with one for all its choices has its own name for name."""
    found: dict[tuple[str, str], type] = {}
    for plugin in _here().values():
        config: type = importlib.import_module(plugin.module).Config
        if not (dataclasses.is_dataclass(config) and getattr(config, "name", None) == plugin.name):
            raise _fault(plugin.path, f'Config must be a dataclass that begins with name: str = "{plugin.name}"')
        found[plugin.group, plugin.name] = config
    for group, (module, name) in SCHEMAS.items():
        found[group, group] = getattr(importlib.import_module(module), name)
    return found


def splits_products(planner: str) -> bool:
    """Whether a planner says how devices split matrix products."""
    return getattr(schemas().get(("planner", planner)), "splits_products", False)


def build(group: str, node: DictConfig, *extra: Any) -> Any:
    """Build the plug-in `node.name` from its part of the configuration: what its `build(config, *extra)` returns.

    The node may also come from a file: it is checked against the plug-in's Config.
    """
    module = _module(group, node)
    return module.build(_config(module, node), *extra)


def problems(group: str, node: DictConfig) -> list[Problem]:
    """What the plug-in's own `check(config)`, if it has one, refuses: a ValueError with a line for each problem.

    A line is `key   what   -> mend`, as `harness.problem.table` prints it.
    """
    module = _module(group, node)
    if not hasattr(module, "check"):
        return []
    try:
        module.check(_config(module, node))
    except ValueError as error:
        return [_from_line(line) for line in str(error).splitlines()]
    return []


def unsuited(data: DictConfig, model: DictConfig) -> list[Problem]:
    """What the data set's `suits(config, task, model)`, if it has one, has against the model.

    A model that says no `TASK` beside its Config is judged only when it is built.
    """
    module, task = _module("data", data), getattr(_module("model", model), "TASK", None)
    if task is None or not hasattr(module, "suits"):
        return []
    try:
        module.suits(_config(module, data), task, _config(_module("model", model), model))
    except ValueError as error:
        return [_from_line(line) for line in str(error).splitlines()]
    return []


def _candidates(root: Path, folder: str) -> list[Path]:
    """The files of a group's folder that may be plug-ins. A folder with a group of its own is none of them."""
    inner = {root / other for other in FOLDERS.values()}
    modules = [path for path in (root / folder).glob("*.py") if path.stem != "__init__"]
    packages = [path for path in (root / folder).glob("*/config.py") if path.parent not in inner]
    return sorted(modules + packages)


def _plugin(group: str, path: Path, root: Path) -> Plugin | None:
    """The plug-in in `path`; None for a helper module, one without Config."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise _fault(path, f"line {error.lineno} is not Python: {error.msg}") from error
    if not any(isinstance(item, ast.ClassDef) and item.name == "Config" for item in body):
        return None
    if not any(isinstance(item, ast.FunctionDef) and item.name == "build" for item in body):
        raise _fault(path, "has a Config and no function build(config)")
    name = path.parent.name if path.name == "config.py" else path.stem
    return Plugin(group, name, ".".join(path.relative_to(root).with_suffix("").parts), path)


@functools.cache
def _here() -> dict[tuple[str, str], Plugin]:
    return {(plugin.group, plugin.name): plugin for plugin in scan()}


def _module(group: str, node: DictConfig) -> Any:
    if (group, node.name) not in _here():
        known = ", ".join(name for owner, name in _here() if owner == group)
        raise CannotRun([Problem(f"{group} {node.name}", f"is not one of {known}")])
    return importlib.import_module(_here()[group, node.name].module)


def _config(module: Any, node: DictConfig) -> Any:
    typed = OmegaConf.get_type(node) is module.Config
    return OmegaConf.to_object(node if typed else OmegaConf.merge(_schema(module.Config), node))


@functools.cache
def _schema(kind: type) -> Any:
    return OmegaConf.structured(kind)


def _from_line(line: str) -> Problem:
    text, _, mend = line.partition("-> ")
    key, _, what = text.strip().partition("   ")
    return Problem(key, what.strip(), mend.strip())


def _fault(path: Path, what: str) -> CannotRun:
    return CannotRun([Problem(str(path), what)])
