"""The shards of a checkpoint, by torch.distributed.checkpoint: a file of each rank, and one that says what is where.

    step-4.shards/.metadata        names, sizes, and in which file each part is
    step-4.shards/__0_0.distcp     what rank 0 has of weights and optimizer state: model.NAME, optimizer.NAME.KEY
    step-4.shards/__1_0.distcp     what rank 1 has

Other tools read the folder, too (`torch.distributed.checkpoint.format_utils.dcp_to_torch_save`). All functions that say
so are collective. Importing this module imports torch.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from harness.run import checkpoint_files

METADATA = ".metadata"
_KINDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
"""What a file with the places of tensors may hold; torch reads it with pickle as it is."""


def write(folder: Path, shards: dict[str, Any]) -> dict[str, int]:
    """Collective: each rank writes its part of the tensors. Returns the checksums of the files that this rank wrote.

    Raises in every rank the OSError of any of them.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    rank = dist.get_rank()
    sums: dict[str, int] = {}

    def add(*paths: Path) -> None:
        sums.update((path.name, checkpoint_files.checksum(path)) for path in paths)

    class Writer(checkpoint.FileSystemWriter):
        """Removes what was there, and reads what it has written, where an error of one rank is known to all."""

        def prepare_global_plan(self, *arguments: Any, **named: Any) -> Any:
            checkpoint_files.remove_folder(folder)
            folder.mkdir(parents=True)
            return super().prepare_global_plan(*arguments, **named)

        def write_data(self, *arguments: Any, **named: Any) -> Any:
            written = super().write_data(*arguments, **named)
            add(*folder.glob(f"__{rank}_*"))
            return written

        def finish(self, *arguments: Any, **named: Any) -> None:
            super().finish(*arguments, **named)
            add(folder / METADATA)

    writer = Writer(folder)
    writer.fs = _files()
    try:
        checkpoint.save(shards, storage_writer=writer)
    except CheckpointException as error:
        _raise_os_error(error)
    return sums


def _files() -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Files(FileSystem):
        """Files whose errors remain those of the operating system."""

        @contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
            with super().create_stream(path, mode) as file, checkpoint_files.recording(file) as recorded:
                yield recorded

    return Files()


def _raise_os_error(error: Any) -> NoReturn:
    """Raise the first rank's OSError; another failure as it is."""
    for _, (failure, _) in sorted(error.failures.items()):
        if isinstance(failure, OSError):
            raise failure from error
    raise error


def read(folder: Path, shards: dict[str, Any]) -> None:
    """Collective: fill the tensors, each rank its part; they may have been written by another number of ranks."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import Metadata

    class Reader(checkpoint.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            found: Metadata = _metadata(folder)
            return found

    checkpoint.load(shards, storage_reader=Reader(folder))


def optimizer_keys(folder: Path) -> dict[str, list[str]]:
    """The keys of each parameter's optimizer state that are in shards: {"linear.weight": ["exp_avg", "exp_avg_sq"]}."""
    found: dict[str, list[str]] = {}
    for kind, name, *key in _metadata(folder).planner_data.values():
        if kind == "optimizer":
            found.setdefault(name, []).extend(key)
    return found


def _metadata(folder: Path) -> Any:
    """What is where. Raises UnpicklingError where it is something else than tensors."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with (folder / METADATA).open("rb") as file:
        found = _Unpickler(file).load()
    if not all(isinstance(one, TensorStorageMetadata) for one in found.state_dict_metadata.values()):
        raise pickle.UnpicklingError(f"{folder} holds more than tensors")
    return found


class _Unpickler(pickle.Unpickler):
    """Reads what a checkpoint's metadata consists of, and runs no other code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KINDS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong to the metadata of a checkpoint")
        return super().find_class(module, name)


def size_of(shards: Any) -> int:
    """The bytes of this rank's shards."""
    if isinstance(shards, Mapping):
        return sum(map(size_of, shards.values()))
    own = shards.to_local() if hasattr(shards, "to_local") else shards
    return int(own.numel() * own.element_size())
