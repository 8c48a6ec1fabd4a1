"""Table 1: what the paper says of each method, and what can be checked of it where we have the method, too."""

from __future__ import annotations

from analysis.autoddl.fig9_fig10 import CLOUD_VGG, LARGE, OURS, SMALL, TRANSFORMERS, VGG, communication
from analysis.autoddl.sweep_results import Results
from analysis.paper_data import numbers

SCHEMES = {
    "Data Parallel [25]": "data parallel",
    "Megatron [31]": "Megatron-like",
    "Summa [41]": "SUMMA",
    "AutoDDL": OURS,
}
"""Ours, by the paper's names."""
SAID = ("supported_models", "asymptotically_optimal_strategy", "search_cost", "ease_of_adaptation")
SETTINGS = (*VGG, *TRANSFORMERS, *CLOUD_VGG, SMALL, LARGE)
"""Settings of Figures 9 and 10."""


def published() -> dict[str, tuple[str, ...]]:
    """`SAID` of each method, in the paper's order."""
    by_method: dict[str, dict[str, str]] = {}
    for number in numbers("autoddl_table1_methods"):
        by_method.setdefault(number.scheme, {})[number.metric] = number.value
    return {method: tuple(values[metric] for metric in SAID) for method, values in by_method.items()}


def fits(results: Results, scheme: str) -> tuple[int, int]:
    """Return the number of settings in which a scheme divides evenly and fits, and in which it was run."""
    ran = [setting for setting in SETTINGS if setting.was_run(results, scheme)]
    return sum(setting.chosen(results, scheme) is not None for setting in ran), len(ran)


def sends(results: Results, scheme: str) -> tuple[float, float] | None:
    """Return the range of a scheme's communication / AutoDDL's over settings; None if no setting has both."""
    seconds = [setting.seconds(results, communication) for setting in SETTINGS]
    ratios = [one[scheme] / one[OURS] for one in seconds if {scheme, OURS} <= one.keys()]
    return (min(ratios), max(ratios)) if ratios else None
