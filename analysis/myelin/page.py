"""`python -m analysis.myelin [SOURCE...]`: the paper's figures next to ours, and its claims.

The records are those of the sweeps myelin_*, at both scales:
as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import paper_cli
from analysis.myelin import tables
from analysis.myelin.cells import cells
from analysis.myelin.claim_checks import verdicts
from analysis.myelin.plots import FIGURES
from analysis.myelin.sweep_results import FOLDERS, Results
from harness.config import registry

PAGE = paper_cli.Page(
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
    cells=cells,
)
