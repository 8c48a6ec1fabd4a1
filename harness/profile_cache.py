"""Profiles on disk, so that a model is measured once: the file's name is a hash of all that a profile depends on.

They lie in $REGATTA_CACHE/profiles, else $XDG_CACHE_HOME/regatta/profiles, else ~/.cache/regatta/profiles. The cache
may be lost or spoilt at any time: whatever cannot be read is measured again.
With `remeasure=true` nothing is taken from it that is older than this process.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.profile import ModelProfile
from harness.serial import SchemaError

MEASURING = (
    "profiling.py", "counting.py", "work.py", "products.py", "chain.py", "profile.py", "dropout.py", "skip.py",
    "malloc.py",
)  # fmt: skip
"""Modules of harness/ whose edits make a profile out of date; the number of threads stands in the first."""
BEGUN_S = time.time()
"""When this process began."""


def path(
    model_config: dict[str, Any],
    model_package: Path,
    micro_batch: int,
    dtype: str,
    device_name: str,
    autocast: str | None = None,
) -> Path:
    """Where the profile of a model is kept, whether or not it is there yet.

    `model_config` is the resolved config of the model, `model_package` its module or its package (or the config.py of
    it), `device_name` the CPU's or GPU's (`harness.devices.detect().name`). Two calls give the same path only if
    these, the sources of model and profiling, and torch's version are the same.
    """
    harness = Path(__file__).parent
    key = {
        "model": model_config,
        "micro_batch": micro_batch,
        "dtype": dtype,
        "autocast": autocast,
        "device": device_name,
        "torch": importlib.metadata.version("torch"),
        "sources": _digest([*_sources(model_package), *(harness / name for name in MEASURING)]),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", str(model_config.get("name", "model")))
    return folder() / f"{name}-{micro_batch}-{dtype}-{digest}.json"


def folder() -> Path:
    """The folder of cached profiles."""
    if own := os.environ.get("REGATTA_CACHE"):
        return Path(own) / "profiles"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "regatta" / "profiles"


def load(path: Path) -> ModelProfile | None:
    """The profile at `path`, or None where there is none that can be read: absent, damaged, of another schema."""
    try:
        return ModelProfile.load(path)
    except (OSError, SchemaError, RecursionError):
        return None


def is_there(path: Path, remeasure: bool = False) -> bool:
    """Whether something is kept at `path`; with `remeasure` only what was stored since this process began."""
    return os.path.exists(path) and not (remeasure and age_s(path) > time.time() - BEGUN_S)


def age_s(path: Path) -> float:
    """Seconds since the file at `path` was written: 0 where there is none, or where it is from the future."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def store(path: Path, profile: ModelProfile) -> None:
    """Keep a profile. A folder that cannot be written is a warning: the run goes on, the next one measures again."""
    try:
        profile.save(path)
    except OSError as error:
        warnings.warn(
            f"the profile is not cached, the next run measures again: {path}: {error.strerror or error} "
            "-> set REGATTA_CACHE to a folder that can be written",
            stacklevel=2,
        )


def _sources(package: Path) -> Iterator[Path]:
    """The Python files of a model: its module, or all of its package."""
    package = package.parent if package.name == "config.py" else package
    yield from sorted(package.rglob("*.py")) if package.is_dir() else (package,)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
