"""`python -m analysis.myelin [SOURCE...]`: the paper's figures beside ours, and its claims.

The records are those of the sweeps myelin_*, at both scales:
as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import command
from analysis.myelin import tables
from analysis.myelin.rows import FOLDERS, Results
from analysis.myelin.verdicts import verdicts
from analysis.plots.myelin import FIGURES
from harness import registry

PAGE = command.Page(
    module="analysis.myelin",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "myelin.md",
    title="Myelin: paper, simulated, measured in small",
    intro="Made by `python -m analysis.myelin --write` from the records of sweeps/myelin_*.",
    sweeps=FOLDERS,
    results=Results,
    sections=tables.sections,
    verdicts=verdicts,
    missing=Results.missing,
    figures=FIGURES,
    width=190,
)
