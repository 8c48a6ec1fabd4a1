"""The absolute figures that AutoDDL's paper prints, next to the simulated ones: savings as what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from analysis import run_artifacts
from analysis.autoddl import fig3_fig4, savings
from analysis.autoddl.claim_checks import BILLION
from analysis.autoddl.fig9_fig10 import (
    BASELINES,
    CLOUD_VGG,
    LARGE,
    OURS,
    SMALL,
    STAGED,
    TRANSFORMERS,
    VGG,
    Setting,
    communication,
    steps,
)
from analysis.autoddl.sweep_results import Results, Row
from analysis.cells import Cell, billions, compared
from analysis.paper_data import counted, value

Figures = dict[str, tuple[float | None, float | None]]
Baselines = tuple[str, ...]
SETTINGS: tuple[tuple[str, tuple[Setting, ...], Baselines], ...] = (
    ("Fig. 9, VGG13", VGG, ("Megatron-like",)),
    ("Fig. 9, Transformers", TRANSFORMERS, BASELINES),
    ("Fig. 10, VGG13", CLOUD_VGG, ("data parallel",)),
    ("Fig. 10, Transformer", (LARGE,), ("Megatron-like",)),
)
"""Settings, and what AutoDDL is compared with there: the best of these, as the claims AD-8 to AD-11 have it."""


def cells(results: Results) -> list[Cell]:
    """Figures 3, 9 and 10, and Table 3."""
    found = [*_fig3(results), *_parameters(results)]
    for table, settings, against in SETTINGS:
        for quantity, published, ours in (
            ("step that is left", savings.step_saving, steps),
            ("communication that is left", savings.communication_saving, communication),
        ):
            figures = {one.title: (_left(published(one)), _remaining(results, one, against, ours)) for one in settings}
            found += compared(table, quantity, figures)
    return [*found, *_slowdowns(results), *_table3(results)]


def _fig3(results: Results) -> Iterator[Cell]:
    ran = fig3_fig4.fig3(results)
    figures: Figures = {
        name: (fig3_fig4.published(name), fig3_fig4.elements(ran[name]) / BILLION if name in ran else None)
        for name in fig3_fig4.FIG3
    }
    yield from compared("Fig. 3", "elements, 2^30", figures)


def _parameters(results: Results) -> Iterator[Cell]:
    for sweep, settings in (("Fig. 9", TRANSFORMERS), ("Fig. 10", (SMALL, LARGE))):
        figures: Figures = {}
        for one in settings:
            row = one.chosen(results, OURS)
            ours = run_artifacts.optional(run_artifacts.parameters, row.record) if row and row.record else None
            published = counted(savings.FILES[one.sweep], "parameters", model=savings.MODELS[one.model])
            figures[one.title] = (billions(published), billions(ours))
        yield from compared(f"{sweep}, Transformers", "parameters, 1e9", figures)


def _slowdowns(results: Results) -> Iterator[Cell]:
    """How many times slower data parallelism is than AutoDDL, and SUMMA than the best baseline."""
    slower: Figures = {}
    for one in VGG:
        times = one.seconds(results, steps)
        paper = value(savings.FILES["fig9"], "slowdown_of_data_parallel_vs_autoddl", devices=one.devices)
        slower[one.title] = (paper, _over(times, "data parallel", (OURS,)))
    yield from compared("Fig. 9, VGG13", "data parallelism / AutoDDL", slower)
    paper = value(savings.FILES["fig10"], "slowdown_of_summa_vs_best_baseline")
    ours = _over(LARGE.seconds(results, steps), "SUMMA", BASELINES[:2])
    yield from compared("Fig. 10, Transformer", "SUMMA / best baseline", {LARGE.title: (paper, ours)})


def _table3(results: Results) -> Iterator[Cell]:
    """Seconds of a step with the paper's number of stages."""
    for model in dict.fromkeys(one.title.partition(",")[0] for one in STAGED):
        figures: Figures = {}
        for staged in (one for one in STAGED if one.title.startswith(model)):
            for scheme in ("Megatron", "AutoDDL"):
                stages = int(staged.published("optimal_pipeline_stages", scheme))
                ours = staged.times(results, scheme.lower()).get(stages)
                figures[f"{scheme}, {staged.nodes} nodes"] = (staged.published("time", scheme), ours)
        yield from compared(f"Table 3, {model}", "step, s", figures)


def _left(saved: float | None) -> float | None:
    """What a saving in percent leaves, as a share."""
    return None if saved is None else 1 - saved / 100


def _remaining(results: Results, setting: Setting, against: Baselines, of: Callable[[Row], float]) -> float | None:
    """A figure of AutoDDL over that of the fastest baseline of `against`."""
    step_s = setting.seconds(results, steps)
    fitting = [name for name in against if name in step_s]
    if not fitting or OURS not in step_s:
        return None
    figures = setting.seconds(results, of)
    return figures[OURS] / figures[min(fitting, key=lambda name: step_s[name])]


def _over(times: dict[str, float], scheme: str, others: Baselines) -> float | None:
    """A scheme's time over the best of others."""
    known = [times[name] for name in others if name in times]
    return times[scheme] / min(known) if scheme in times and known else None
