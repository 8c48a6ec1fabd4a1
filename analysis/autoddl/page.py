"""`python -m analysis.autoddl [SOURCE...]`: the paper's figures beside ours, and its claims.

The records are those of the sweeps autoddl_fig3 to autoddl_table3:
as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import command
from analysis.autoddl import tables
from analysis.autoddl.rows import FOLDERS, Results
from analysis.autoddl.verdicts import verdicts
from analysis.plots.autoddl import FIGURES
from harness import registry

PAGE = command.Page(
    module="analysis.autoddl",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "autoddl.md",
    title="AutoDDL: paper, planned, simulated, measured",
    intro="Made by `python -m analysis.autoddl --write` from the records of sweeps/autoddl_fig3 to autoddl_table3.",
    sweeps=FOLDERS,
    results=Results,
    sections=tables.sections,
    verdicts=verdicts,
    missing=Results.missing,
    figures=FIGURES,
    width=170,
)
