"""`python -m analysis.madpipe [SOURCE...]`: the paper's figures beside ours, and its claims.

The records are those of the sweeps madpipe_fig6 to madpipe_fig8:
as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import command
from analysis.madpipe import tables
from analysis.madpipe.rows import FOLDERS, Results
from analysis.madpipe.verdicts import verdicts
from analysis.plots.madpipe import FIGURES
from harness import registry

PAGE = command.Page(
    module="analysis.madpipe",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "madpipe.md",
    title="MadPipe: planned",
    intro="Made by `python -m analysis.madpipe --write` from the records of sweeps/madpipe_fig6 to madpipe_fig8.",
    sweeps=FOLDERS,
    results=Results,
    sections=tables.sections,
    verdicts=verdicts,
    missing=Results.missing,
    figures=FIGURES,
    width=190,
)
