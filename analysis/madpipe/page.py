"""`python -m analysis.madpipe [SOURCE...]`: the paper's figures next to ours, and its claims.

The records are those of the sweeps madpipe_*: as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import paper_cli
from analysis.madpipe import tables
from analysis.madpipe.claim_checks import verdicts
from analysis.madpipe.plots import FIGURES
from analysis.madpipe.sweep_results import FOLDERS, Results
from harness.config import registry

PAGE = paper_cli.Page(
    module="analysis.madpipe",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "madpipe.md",
    title="MadPipe: planned",
    intro="Made by `python -m analysis.madpipe --write` from the records of sweeps/madpipe_*.yaml.",
    sweeps=FOLDERS,
    results=Results,
    sections=tables.sections,
    verdicts=verdicts,
    missing=Results.missing,
    figures=FIGURES,
)
