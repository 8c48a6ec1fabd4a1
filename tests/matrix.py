"""Every engine x planner x model x mesh, run for one step: `make matrix` writes docs/matrix.md.

A cell is "ok" or the first problem that the run named. Any other end is an error of the project.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import files, registry
from harness.record import RunRecord

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "matrix.md"
MESHES = ("mesh.pipeline=1", "mesh.pipeline=2", "mesh.pipeline=4")
NEED_MORE = ("given",)
"""Planners that run nothing without further keys of the user's."""
SMALL = ("steps=1", "warmup=0", "batch.size=4", "batch.micro_batches=2", "tracker=none", "cluster.devices=4")


def names(group: str) -> list[str]:
    """The plug-ins of a group; each model's small preset has its plug-in's name."""
    found = sorted(plugin.name for plugin in registry.scan() if plugin.group == group)
    return [name for name in found if name not in NEED_MORE]


def cell(engine: str, planner: str, model: str, mesh: str) -> str:
    """Run it; "ok", or what the run says about why not."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"engine={engine}", f"planner={planner}", f"model={model}", mesh, *SMALL, f"out={folder}"]
        command = [sys.executable, "run.py", *overrides]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
        record = RunRecord.load(Path(folder) / "record.json")
    if record.status == "ok":
        return "ok"
    lines = [line.strip() for line in record.reason.splitlines()]
    return f"{record.status}: {lines[1] if record.status == 'infeasible' and len(lines) > 1 else record.reason}"


def page(cells: dict[tuple[str, str, str, str], str]) -> str:
    """The Markdown page: a row for each engine, planner and model, a column for each mesh."""
    lines = [
        "# What runs with what", "",
        "Made by `make matrix`: each cell was run for one step on four CPU devices, with small presets.", "",
        "| engine | planner | model | " + " | ".join(MESHES) + " |", "|" + "---|" * (3 + len(MESHES)),
    ]  # fmt: skip
    for row in dict.fromkeys(key[:3] for key in cells):
        lines.append("| " + " | ".join([*row, *(cells[(*row, mesh)] for mesh in MESHES)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    cells = {}
    for key in itertools.product(names("engine"), names("planner"), names("model"), MESHES):
        cells[key] = cell(*key)
        print(" ".join(key), "->", cells[key], flush=True)
    files.write_text(PAGE, page(cells))
    broken = [key for key, said in cells.items() if said != "ok" and not said.startswith("infeasible")]
    print(f"{len(cells)} cells, {len(broken)} broken; written to {PAGE}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
