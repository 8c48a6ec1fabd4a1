"""Whether a node has what a run needs of it: the folder of the run, and the same code. Free of torch."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from harness.core.run_files import CONFIG

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engines", "harness", "models", "planners")
POLL_S = 0.05


def code() -> str:
    """Return a digest of the code that trains, which must be the same on all nodes."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def unfit(folder: Path, wanted: str, visible_s: float, owner: str, nodes: str) -> str:
    """Return why this node cannot train in the folder that `owner` has made, with the code `wanted`; "" if it can.

    The folder must be there within `visible_s` seconds, as it is where all `nodes` share it.
    """
    deadline = time.monotonic() + visible_s
    while not (folder / CONFIG).exists():
        if time.monotonic() > deadline:
            return f"{folder} of {owner} is not there -> out= on a file system that all {nodes} share"
        time.sleep(POLL_S)
    if code() != wanted:
        return f"the code in {ROOT} is another version than {owner}'s -> the same checkout on all {nodes}"
    return ""
