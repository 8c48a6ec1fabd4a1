"""Sweeps by the names of their folders in runs/: SWEEP, or SWEEP-SCALE where sweeps/SWEEP.yaml has scales."""

from __future__ import annotations

from harness.registry import ROOT


def command(name: str) -> str:
    """What makes the records of a sweep's folder; empty for a name that is no sweep's."""
    sweep, _, scale = name.partition("-")
    if not (ROOT / "sweeps" / f"{sweep}.yaml").is_file():
        return ""
    return f"python run.py -m +sweeps={sweep}" + (f" scale={scale}" if scale else "")
