"""Finds engines, planners, models, data sets and trackers by scanning their folders: nothing lists their names.

A plug-in NAME is a module NAME.py, or a package NAME/ with an engine.py, a planner.py, or (models and data sets) a
config.py. It holds a dataclass `Config` and a function `build(config, ...)`, and can be imported without torch; the
`build` of a package with config.py stands in NAME.py next to it, which may import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from harness.config.plain_config import composed
from harness.config.schema import Config
from harness.core.problem import CannotRun, Problem

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "engine": "engines",
    "planner": "planners",
    "model": "models",
    "data": "models/data",
    "tracker": "harness/trackers",
}
FURTHER = "REGATTA_CONFIG_DIR"
"""The variable with a further folder of choices (`--config-dir`), which the points of a sweep inherit, also those of an
array."""
PACKAGE_FILES = ("engine.py", "planner.py", "config.py")
"""The module of a package that is the plug-in."""
SCHEMAS = {
    "cluster": ("harness.config.cluster_config", "ClusterConfig"),
    "precision": ("harness.config.schema", "PrecisionConfig"),
}
"""Groups with one dataclass for all their choices."""
RETURNS = {
    "engine": ("harness.interfaces.Engine", "session"),
    "planner": ("harness.interfaces.Planner", "plan"),
    "model": ("harness.interfaces.Model", "layers"),
    "data": ("harness.interfaces.Data", "batch"),
    "tracker": ("harness.trackers.Tracker", "start"),
}
"""What `build` of a group must return, and a method by which that is known."""
GROUPS = (*FOLDERS, *SCHEMAS)
"""All groups of choices."""
USER_MODEL = "harness.user_model.plugin"
"""The plug-in of models that a callable of the user's makes. Their part of the configuration has a key `callable`, and
keys that no dataclass lists before the callable is known."""


@dataclass(frozen=True)
class Plugin:
    """One choice of a group: `module` (a dotted name) at `path` holds its Config and its build."""

    group: str
    name: str
    module: str
    path: Path

    @property
    def builder(self) -> str:
        """The module that holds `build`: that of the keys, or NAME.py next to a config.py."""
        package, _, last = self.module.rpartition(".")
        return f"{package}.{self.name}" if last == "config" else self.module


def scan(root: Path = ROOT) -> list[Plugin]:
    """Every plug-in below `root`, by group and name. Reads the sources and imports nothing.

    Raises CannotRun for a source that has a Config and no build.
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
        try:
            with _may_not_exit(plugin.path, "the module"):
                config: type = importlib.import_module(plugin.module).Config
        except SyntaxError as error:
            raise _fault(plugin.path, f"line {error.lineno} is not Python: {error.msg}") from error
        if not (dataclasses.is_dataclass(config) and getattr(config, "name", None) == plugin.name):
            raise _fault(plugin.path, f'Config must be a dataclass that begins with name: str = "{plugin.name}"')
        found[plugin.group, plugin.name] = config
    for group, (module, name) in SCHEMAS.items():
        found[group, group] = getattr(importlib.import_module(module), name)
    return found


def further() -> str | None:
    """The user's folder of choices, of this process or of one that has started it."""
    return os.environ.get(FURTHER) or None


def is_user_model(group: str, node: DictConfig) -> bool:
    """Whether a part of the configuration is that of a model of the user's own."""
    return group == "model" and "callable" in node


def source(group: str, node: DictConfig) -> Path:
    """The source of the plug-in `node.name`: its package, or its module. That of a user's model is in its keys."""
    if is_user_model(group, node):
        return ROOT / "harness" / "user_model"
    path = _here()[group, node.name].path
    return path.parent if path.name in PACKAGE_FILES else path


def splits_matmuls(planner: str) -> bool:
    """Return whether a planner splits matmuls over devices (tensor parallelism)."""
    return getattr(schemas().get(("planner", planner)), "splits_matmuls", False)


def is_scheme(engine: str) -> bool:
    """Return whether an engine is a way to use devices; else it stands in for another one, on one device."""
    return getattr(schemas().get(("engine", engine)), "scheme", True)


def planners(engine: str) -> tuple[str, ...]:
    """Return the planners that an engine names, the first one for who asks for none; (): it takes any."""
    return getattr(schemas().get(("engine", engine)), "PLANNERS", ())


def on_gpus(engine: str) -> dict[str, Any]:
    """Return the keys of an engine that are others by default where it trains on GPUs, with their values."""
    return getattr(schemas().get(("engine", engine)), "ON_GPUS", {})


def defaults(group: str, name: str) -> DictConfig:
    """Return the part of the configuration of a plug-in as it is by default."""
    found: DictConfig = OmegaConf.structured(schemas()[group, name])
    return found


def default_keys(choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of a run as they are by default, those of a group for its choice ({"engine": "ddp"})."""
    found = _container(Config)
    for group, name in choices.items():
        if schema := schemas().get((group, name)) or schemas().get((group, group)):
            found[group] = _container(schema)
    return found


def _container(schema: type) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(schema), throw_on_missing=False)


def build(group: str, node: DictConfig, *extra: Any) -> Any:
    """Build the plug-in `node.name` from its part of the configuration: what its `build(config, *extra)` returns.

    The node may also come from a file: it is checked against the plug-in's Config. Raises CannotRun where `build` ends
    the process, or returns something else than its group's.
    """
    node = composed(node)
    if is_user_model(group, node):
        return importlib.import_module(USER_MODEL).build(_settings(node))
    settings = _config(_module(group, node), node)
    builder, (wanted, method) = _here()[group, node.name].builder, RETURNS[group]
    path = ROOT / f"{builder.replace('.', '/')}.py"
    with _may_not_exit(path, "build()"):
        built = importlib.import_module(builder).build(settings, *extra)
    if not hasattr(built, method):
        raise _fault(path, f"build() returned {_described(built)}, it must return a {wanted}")
    return built


def problems(group: str, node: DictConfig) -> list[Problem]:
    """Return the problems that the plug-in's own `check(config)` finds, if it has one."""
    if is_user_model(group, node):
        found: list[Problem] = importlib.import_module(USER_MODEL).check(_settings(node))
        return found
    module = _module(group, node)
    return _checked(module, "check", _config(module, node)) if hasattr(module, "check") else []


def identity(group: str, node: DictConfig) -> dict[str, Any]:
    """What a plug-in's keys mean, to know the same one again: what its `identity(config)` returns, else the keys.

    Where a key names a file, its contents count and its name does not.
    """
    keys: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    if is_user_model(group, node):
        found: dict[str, Any] = importlib.import_module(USER_MODEL).identity(_settings(node))
        return found
    module = _module(group, node)
    return {**keys, **module.identity(_config(module, node))} if hasattr(module, "identity") else keys


def model_name(node: DictConfig, former: str) -> str:
    """The name of a model that had the name `former` when it was profiled; the file of a user's may be another now."""
    if not is_user_model("model", node):
        return former
    found: str = importlib.import_module(USER_MODEL).renamed(former, _settings(node))
    return found


def unsuited(data: DictConfig, model: DictConfig) -> list[Problem]:
    """Return the problems that the data set's `check_model(config, task, model)` finds, if it has one.

    A model without a `TASK` next to its Config is checked only when it is built.
    """
    module = _module("data", data)
    if is_user_model("model", model):
        given = {key: value for key, value in _settings(model).items() if value is not None}
        task, keys = given.get("task"), SimpleNamespace(**given)
    else:
        task, keys = getattr(_module("model", model), "TASK", None), _config(_module("model", model), model)
    if task is None or not hasattr(module, "check_model"):
        return []
    return _checked(module, "check_model", _config(module, data), task, keys)


def _checked(module: Any, function: str, *given: Any) -> list[Problem]:
    """The problems that a function of a plug-in returns."""
    path = Path(module.__file__)
    with _may_not_exit(path, f"{function}()"):
        found: Any = getattr(module, function)(*given)
    others = [] if not isinstance(found, list) else [item for item in found if not isinstance(item, Problem)]
    if others or not isinstance(found, list):
        returned = f"a list with {_described(others[0])}" if others else _described(found)
        raise _fault(path, f"{function}() returned {returned}, it must return a list of harness.core.problem.Problem")
    return found


@contextmanager
def _may_not_exit(path: Path, function: str) -> Iterator[None]:
    """Say of a plug-in's function that it calls sys.exit, in the place of the end of the process."""
    try:
        yield
    except SystemExit as error:
        raise _fault(path, f"{function} calls sys.exit({error.code!r}), it must return or raise an error") from error


def _described(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"


def _candidates(root: Path, folder: str) -> list[Path]:
    """The files of a group's folder that may be plug-ins. A folder with a group of its own is none of them."""
    inner = {root / other for other in FOLDERS.values()}
    modules = [path for path in (root / folder).glob("*.py") if path.stem != "__init__"]
    packages = [
        path for name in PACKAGE_FILES for path in (root / folder).glob(f"*/{name}") if path.parent not in inner
    ]
    return sorted(modules + packages)


def _plugin(group: str, path: Path, root: Path) -> Plugin | None:
    """The plug-in in `path`; None for a helper module, one without Config."""
    if not _defines(path, "class Config"):
        return None
    name = path.parent.name if path.name in PACKAGE_FILES else path.stem
    builder = path.with_name(f"{name}.py") if path.name == "config.py" else path
    if not _defines(builder, "def build"):
        raise _fault(builder, "has no function build(config)")
    return Plugin(group, name, ".".join(path.relative_to(root).with_suffix("").parts), path)


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}") from error


def _defines(path: Path, definition: str) -> bool:
    """Whether the module at `path` has this definition at its top level. Reads the lines, which takes no parser."""
    return any(re.match(rf"{definition}\b", line) for line in _source(path).splitlines())


@functools.cache
def _here() -> dict[tuple[str, str], Plugin]:
    return {(plugin.group, plugin.name): plugin for plugin in scan()}


def _module(group: str, node: DictConfig) -> Any:
    if (group, node.name) not in _here():
        known = ", ".join(name for owner, name in _here() if owner == group)
        raise CannotRun([Problem(group, node.name, f"is not one of {known}")])
    return importlib.import_module(_here()[group, node.name].module)


def _settings(node: DictConfig) -> dict[str, Any]:
    """The keys of a user's model, whose values are those of plain Python."""
    settings: Any = OmegaConf.to_container(node, resolve=True)
    return settings


def _config(module: Any, node: DictConfig) -> Any:
    typed = OmegaConf.get_type(node) is module.Config
    return OmegaConf.to_object(node if typed else OmegaConf.merge(_schema(module.Config), node))


@functools.cache
def _schema(kind: type) -> Any:
    return OmegaConf.structured(kind)


def _fault(path: Path, message: str) -> CannotRun:
    return CannotRun([Problem(str(path), None, message)])
