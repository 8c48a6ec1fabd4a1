"""Files of a run's folder: what is in them, and others in their place."""

from __future__ import annotations

from pathlib import Path

TYPED = ["engine=ddp", "model=mlp", "batch.size=8", "batch.micro_batches=2", "cluster.device=cpu", "cluster.devices=2",
         "mesh.data=2", "precision=fp64", "tracker=none", "launch.grace_s=600", "warmup=2", "optimizer.name=adam",
         "optimizer.lr=0.001"]  # fmt: skip
"""A small run of two ranks."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replaced(path: Path, data: bytes | None) -> None:
    """By other bytes, or by a folder."""
    path.unlink()
    path.mkdir() if data is None else path.write_bytes(data)
