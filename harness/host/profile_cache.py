"""Cache of model profiles on disk: the file's name is a hash of all that a profile depends on.

It is in $REGATTA_CACHE/profiles, else $XDG_CACHE_HOME/regatta/profiles, else ~/.cache/regatta/profiles. What is missing
or cannot be read is measured again. With `remeasure=true` profiles older than this process are ignored.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from harness.core.model_profile import ModelProfile
from harness.core.serialization import Document, SchemaError
from harness.host import run_queue

MEASURING = (
    "measure/profile_model.py",
    "measure/reference_work.py",
    "measure/work_together.py",
    "measure/count_model.py",
    "measure/kernel_counter.py",
    "measure/matmul_finder.py",
    "measure/layer_chain.py",
    "measure/layer_traits.py",
    "core/model_profile.py",
    "core/products.py",
    "core/traits.py",
    "nn/dropout.py",
    "nn/object_state.py",
    "nn/shared_state.py",
    "nn/skip.py",
    "nn/tensor_memory.py",
    "nn/tied.py",
    "runtime/compiled_layers.py",
    "runtime/recomputation.py",
    "runtime/training_state.py",
    "host/malloc.py",
)
"""Modules of harness/ whose edits make a profile out of date; the first one sets the number of threads."""
Kind = TypeVar("Kind", bound=Document)
BEGUN_S = time.time()
"""Start time of this process."""


def path(
    model_config: dict[str, Any],
    model_package: Path,
    micro_batch: int,
    dtype: str,
    device_name: str,
    autocast: str | None = None,
    tf32: bool = False,
    cudnn_benchmark: bool = False,
    channels_last: bool = False,
    compiled: bool = False,
) -> Path:
    """Returns the path of the profile of a model, whether or not it exists.

    `model_config` is the resolved config of the model, `model_package` its module or its package (or the config.py of
    it), `device_name` the CPU's or GPU's (`harness.host.devices.detect().name`). Two calls give the same path only if
    these, the sources of model and profiling, and torch's version are the same.
    """
    harness = Path(__file__).parents[1]
    key = {
        "model": model_config,
        "micro_batch": micro_batch,
        "dtype": dtype,
        "autocast": autocast,
        "tf32": tf32,
        "cudnn_benchmark": cudnn_benchmark,
        "channels_last": channels_last,
        "compiled": compiled,
        "device": device_name,
        "torch": importlib.metadata.version("torch"),
        "sources": digest(
            [*_sources(model_package), *(harness / name for name in MEASURING), *_sources(harness / "capture")]
        ),
    }
    return keyed(folder(), str(model_config.get("name", "model")), key, f"{micro_batch}-{dtype}-")


def keyed(folder: Path, name: str, key: Mapping[str, object], more: str = "") -> Path:
    """Returns the path in a folder of what depends on `key`; people know it by its `name` and by `more`."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{plain(name)}-{more}{digest}.json"


def plain(name: str) -> str:
    """Returns a name as a part of a file's."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def folder() -> Path:
    """Returns the folder of cached profiles."""
    if cache_folder := os.environ.get("REGATTA_CACHE"):
        return Path(cache_folder) / "profiles"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "regatta" / "profiles"


def load(path: Path) -> ModelProfile | None:
    """Returns the profile at `path`; None if it is absent or, with a warning, damaged."""
    return read(ModelProfile, path)


def read(kind: type[Kind], path: Path) -> Kind | None:
    """Returns what this cache or another one has at `path`; None if it is absent or, with a warning, damaged."""
    try:
        return kind.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, SchemaError) as error:
        reason = f"{path} {error.strerror}" if isinstance(error, OSError) else str(error)
        warnings.warn(f"the cache is damaged, this is measured again: {reason}", stacklevel=2)
        return None


def exists(path: Path, remeasure: bool = False) -> bool:
    """Returns whether `path` exists; with `remeasure` only if it was stored since this process began."""
    return os.path.exists(path) and not (remeasure and age_s(path) > time.time() - BEGUN_S)


def age_s(path: Path) -> float:
    """Returns the seconds since `path` was written: 0 if it does not exist or is from the future."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def store(path: Path, profile: ModelProfile) -> None:
    """Caches a profile."""
    keep(path, profile, "the profile is not cached")


def keep(path: Path, document: Document, failed: str) -> None:
    """Writes into this cache or another one. A folder that cannot be written is a warning that says what has `failed`:
    the run continues, the next one measures again."""
    try:
        document.save(path)
    except OSError as error:
        warnings.warn(
            f"{failed}, the next run measures again: {path}: {error.strerror or error} "
            "-> set REGATTA_CACHE to a folder that can be written",
            stacklevel=3,
        )


def may_improve(path: Path) -> bool:
    """Whether what was measured on a busy machine should be measured again: by a later process, once, while no other
    program keeps the cores busy. Threads may wait for another reason, a quota for instance."""
    return not exists(path, remeasure=True) and not is_repeated(path) and run_queue.quiet()


def mark_repeated(path: Path) -> None:
    """Notes that the profile at `path` is a measurement that was done again."""
    with suppress(OSError):
        _repeated(path).touch()


def is_repeated(path: Path) -> bool:
    """Returns whether `mark_repeated` was called for a profile."""
    return _repeated(path).exists()


def _repeated(path: Path) -> Path:
    return path.with_suffix(".repeated")


def _sources(package: Path) -> Iterator[Path]:
    """Yields the Python files of a model: its module, or all of its package and the modules next to the package, which
    models share."""
    package = package.parent if package.name == "config.py" else package
    yield from sorted((*package.rglob("*.py"), *package.parent.glob("*.py"))) if package.is_dir() else (package,)


def digest(files: Sequence[Path]) -> str:
    """Returns the hash of these files' names and contents."""
    found = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        found.update(f"{file.name} {len(text)}\n".encode() + text)
    return found.hexdigest()
