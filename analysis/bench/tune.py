"""How long mode=tune searches, with its profiles cached."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from analysis.bench import results

SEARCHES = {
    "gpt_12b on 48 V100, myelin": [
        *("engine=myelin", "engine.order=message_driven", "engine.offload=true", "engine.checkpoint_every=auto"),
        *("model=gpt_12b", "precision=fp16", "optimizer.name=adamw", "batch.size=16384"),
        *("cluster=summit", "cluster.values=effective"),
    ],
    "24 layers on 8 A100, all engines": [
        *("engine=all", "model=gpt", "model.layers=24", "model.hidden=2048", "model.heads=16", "model.sequence=2048"),
        *("model.vocabulary=51200", "cluster=gcp_a100", "cluster.nodes=1", "cluster.devices=8", "batch.size=64"),
    ],
    "gpt_100b on 384 V100, all engines": [
        *("engine=all", "model=gpt_100b", "precision=fp16", "optimizer.name=adamw", "batch.size=1536"),
        *("cluster=summit", "cluster.nodes=64"),
    ],
}
"""The Myelin paper's smallest model, as docs/tutorials/which_scheme.md tunes it; a node of A100; its largest model."""


def tune(rounds: int) -> list[dict[str, Any]]:
    """`python run.py mode=tune ...` from its start to its end: seconds, and the candidates that were simulated."""
    rows = []
    for name, keys in SEARCHES.items():
        _searched(keys)  # makes the profiles
        taken, simulated = zip(*(_searched(keys) for _ in range(max(1, rounds // 3))), strict=True)
        spread = [min(taken), max(taken)]
        rows.append({"entry": name, "step": statistics.median(taken), "quartiles": spread, "simulated": simulated[0]})
    return rows


def _searched(keys: list[str]) -> tuple[float, int]:
    """Seconds of a search, and how many candidates it simulated. Raises CalledProcessError where it found nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", "mode=tune", *keys, f"out={folder}/tuned"]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    simulated = [int(number) for number in re.findall(r"candidates: (\d+) simulated", done.stdout)]
    if not simulated:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return seconds, sum(simulated)
