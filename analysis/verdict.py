"""Whether the claims of a paper hold, of which each has a function, or tests that settle it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from analysis.published import claims

Results = TypeVar("Results")
Found = tuple[bool, str] | None
"""Whether a claim holds, and the figures in a few words; None if what it needs has not been run."""


@dataclass(frozen=True)
class Verdict:
    """`says`: holds, does not hold, not run, or by tests."""

    id: str
    claim: str
    says: str
    figures: str


def judged(
    paper: str, results: Results, judges: Mapping[str, Callable[[Results], Found]], settled: Mapping[str, Sequence[str]]
) -> list[Verdict]:
    """A verdict for each claim of claims/PAPER.csv; `settled` names the tests that settle a claim, or a part of it."""
    told = []
    for claim in claims(paper):
        found = judges[claim.id](results) if claim.id in judges else None
        tests = f"exact in {' and '.join(settled[claim.id])}" if claim.id in settled else ""
        if found is None:
            says, figures = ("by tests" if tests else "not run"), tests
        else:
            says, figures = ("holds" if found[0] else "does not hold"), "; ".join(filter(None, (found[1], tests)))
        told.append(Verdict(claim.id, claim.claim, says, figures))
    return told
