"""`python -m analysis.autoddl [SOURCE...]`: the paper's figures next to ours, and its claims.

The records are those of the sweeps autoddl_fig3 to autoddl_table3:
as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import paper_cli
from analysis.autoddl import tables
from analysis.autoddl.cells import cells
from analysis.autoddl.claim_checks import verdicts
from analysis.autoddl.plots import FIGURES
from analysis.autoddl.sweep_results import FOLDERS, Results
from harness.config import registry

PAGE = paper_cli.Page(
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
    cells=cells,
)
