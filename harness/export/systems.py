"""The systems that a plan is exported for, by the suffix of the file: `mode=plan export=FILE`.

problems     before anything is measured: a suffix of no system, a model that it does not know, a folder that is
             missing, a file that is there
refused      with all other problems of the plan: what the system cannot express
write        the file
"""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Protocol

from omegaconf import DictConfig

from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.export import deepspeed, megatron, torch_pipelining, torchtitan, transformer
from harness.export.planned import Planned


class System(Protocol):
    """A module of this package."""

    NAME: str
    MODELS: tuple[str, ...]
    """The models of this project that the system knows; () for one that takes any."""

    def refused(self, planned: Planned) -> list[Problem]:
        """Why the system cannot follow the plan."""
        ...

    def text(self, planned: Planned) -> str:
        """The file's content."""
        ...

    def note(self, planned: Planned) -> str:
        """How to use FILE."""
        ...


SYSTEMS: dict[str, System] = {".json": deepspeed, ".py": torch_pipelining, ".toml": torchtitan, ".sh": megatron}


def problems(config: DictConfig) -> list[Problem]:
    """What is wrong with the key `export` itself; nothing where it is not given."""
    if config.export is None:
        return []
    path = Path(config.export)
    if config.mode != "plan":
        return [Problem("export", config.export, "is written by mode=plan alone", ({"mode": "plan"},))]
    if path.suffix not in SYSTEMS:
        known = ", ".join(f"{suffix} ({system.NAME})" for suffix, system in SYSTEMS.items())
        message = f"says no system: it ends with one of {known}"
        return [Problem("export", config.export, message, hint=f"export={path.stem or 'plan'}.json")]
    system, name = SYSTEMS[path.suffix], str(config.model.name)
    unknown = system.MODELS and name not in system.MODELS
    found = [transformer.no_model(name, system.NAME, system.MODELS)] if unknown else []
    return [*found, *_unwritable(path, config.export, config.overwrite)]


def refused(planned: Planned) -> list[Problem]:
    """Why the system of `export` cannot follow the plan; what DeepSpeed itself says against its file."""
    system = _system(planned)
    found = system.refused(planned)
    if not found and system is deepspeed:
        found = deepspeed.invalid(planned, planned.config.export)
    return found


def write(planned: Planned) -> str:
    """Write the file; returns what it is and how to use it. Raises CannotRun where that is no longer possible."""
    name, system = str(planned.config.export), _system(planned)
    found = _unwritable(Path(name), name, planned.config.overwrite)
    try:
        if not found:
            files.write_text(Path(name), system.text(planned))
    except OSError as error:
        found = [Problem("export", name, f"cannot be written: {error.strerror}")]
    if found:
        raise CannotRun(found)
    return f"{system.NAME}: {name}\n  {system.note(planned).replace('FILE', shlex.quote(name))}"


def _system(planned: Planned) -> System:
    return SYSTEMS[Path(planned.config.export).suffix]


def _unwritable(path: Path, name: str, overwrite: bool) -> list[Problem]:
    """A folder that is missing or cannot be written, a file that is there."""
    folder = path.parent
    try:
        if path.is_dir():
            return [Problem("export", name, "is a folder", hint=f"export={path / 'plan'}{path.suffix}")]
        if not folder.is_dir():
            what = "a file" if folder.exists() else "missing"
            return [Problem("export", name, f"is in {folder}, which is {what}", hint=f"mkdir -p {folder}")]
        if path.exists() and not overwrite:
            return [Problem("export", name, "is there already", ({"overwrite": True},), "another name")]
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:  # also of a name that no file can have
        message = f"cannot be written: {error.strerror or error}"
        return [Problem("export", name, message, hint="export=FILE in another folder")]
    return []
