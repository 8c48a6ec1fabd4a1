"""A profile that the user gives as a file: reads it, and takes its batch size where none is given."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from harness.checks import mesh
from harness.core import files
from harness.core.memory_model import DTYPE_BYTES
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, Problem, refuse
from harness.core.serialization import SchemaError, parse

TIMES = ("forward_s", "backward_s")


def stored(file: str) -> ModelProfile:
    """A profile from the user's file, which is read again only if it has changed.

    Raises `CannotRun`, also where some layers have times and others lack them: such a file has lost something. (Other
    fields that are not there have their defaults.)
    """
    try:
        there = Path(file).stat()
        return _read(file, there.st_mtime_ns, there.st_size)
    except OSError as error:
        raise CannotRun([Problem("profile", file, error.strerror or str(error))]) from error


@functools.lru_cache(maxsize=1)
def _read(file: str, changed_ns: int, size: int) -> ModelProfile:
    try:
        data = parse(files.read_bytes(Path(file)))
        profile = ModelProfile.from_json(data)
    except SchemaError as error:
        raise CannotRun([Problem("profile", file, str(error))]) from error
    if profile.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise CannotRun([Problem("profile", file, f"has the dtype {profile.dtype!r}, which is not one of {known}")])
    layers = data["layers"]
    if any(name in layer for layer in layers for name in TIMES):
        missing = [(number, layer, name) for number, layer in enumerate(layers) for name in TIMES if name not in layer]
        messages = {f"layer {number} ({layer.get('name', '')}) has no {name}": name for number, layer, name in missing}
        refuse([Problem("profile", file, one, hint=f"{name}, in seconds") for one, name in messages.items()])
    return profile


def follow(config: DictConfig, overrides: Sequence[str]) -> None:
    """Set `batch.size` from the micro-batches of a stored profile, unless the user gives it."""
    if not config.profile or any(text.startswith("batch.size=") for text in overrides):
        return
    with suppress(CannotRun):  # it is raised again once the profile is needed
        config.batch.size = mesh.batch_size(config, stored(config.profile))
