"""The claims that compare schemes in steps (AD-8 to AD-12), each by the paper's protocol for micro-batches.

The other protocol, in which micro-batches are tuned for each scheme, too, is judged by the same rule and stands next to
the first; it does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from analysis.autoddl import savings
from analysis.autoddl.fig9_fig10 import (
    BASELINES,
    CLOUD_VGG,
    LARGE,
    LARGE_SLOW,
    MIXED,
    OURS,
    SMALL,
    STAGED,
    TRANSFORMERS,
    VGG,
    VGG_AT,
    Pick,
    Setting,
    communication,
    steps,
)
from analysis.autoddl.sweep_results import Results, Row, fastest, largest, smallest
from analysis.claim_check import Finding
from analysis.match_records import Need
from analysis.paper_data import printed
from analysis.run_artifacts import MissingData

Judged = tuple[bool, str]
"""Whether a claim holds in a protocol, and its figures."""
MEGATRON, PARALLEL, SUMMA = "Megatron-like", "data parallel", "SUMMA"


def vgg_on_piz_daint(results: Results) -> Finding:
    """One micro-batch: both protocols are the same."""
    right, text = _vgg(results, VGG)
    others = [f"at {gb_s} GB/s {_vgg(results, settings)[1]}" for gb_s, settings in VGG_AT.items()]
    times = printed(savings.FILES["fig9"], "slowdown_of_data_parallel_vs_autoddl")
    theirs = f"{_published(VGG)}; about {times:g} times slower"
    return Finding(right, theirs, "; ".join([f"saved against Megatron-like on 16, 32, 64 nodes {text}", *others]))


def _vgg(results: Results, settings: Sequence[Setting]) -> Judged:
    seconds = _seconds(results, settings, steps)
    order = all(one[OURS] <= one[MEGATRON] < one[PARALLEL] for one in seconds)
    gaps = [1 - one[OURS] / one[MEGATRON] for one in seconds]
    slower = [one[PARALLEL] / one[OURS] for one in seconds]
    grows = all(before < after for before, after in pairwise(gaps))
    return order and grows, f"{_percents(gaps)}, data parallelism {_list(slower)} times slower"


def transformers_on_piz_daint(results: Results) -> Finding:
    return _in_both(_transformers, results, _published(TRANSFORMERS))


def _transformers(results: Results, pick: Pick) -> Judged:
    seconds = [setting.seconds(results, steps, pick) for setting in TRANSFORMERS]
    best = all(OURS in one and one[OURS] <= min(one[n] for n in BASELINES if n in one) for one in seconds)
    ratios = [one[SUMMA] / one[MEGATRON] if {SUMMA, MEGATRON} <= one.keys() else None for one in seconds]
    first, second = ratios[:2]
    catches = first is not None and first > 1 and second is not None and second < first
    text = (
        f"saved against the second best on 64, 128, 256 nodes {_percents([_saved(one) for one in seconds])}; SUMMA / "
        f"Megatron-like {', '.join('-' if ratio is None else f'{ratio:.2f}' for ratio in ratios)}"
    )
    return best and catches, text + _not_fitting(TRANSFORMERS, seconds)


def vgg_on_google_cloud(results: Results) -> Finding:
    """One micro-batch: both protocols are the same."""
    seconds = _seconds(results, CLOUD_VGG, steps)
    order = all(one[OURS] < one[PARALLEL] < one[MEGATRON] for one in seconds)
    shorter = [1 - one[OURS] / one[PARALLEL] for one in seconds]
    less = [1 - one[OURS] / one[PARALLEL] for one in _seconds(results, CLOUD_VGG, communication)]
    worse = [one[MEGATRON] / one[PARALLEL] for one in seconds]
    summary = (
        f"saved against data parallelism {_percents(shorter)} of the time, {_percents(less)} of the communication; "
        f"Megatron-like takes {_list(worse)} times data parallelism's time"
    )
    sent = _published(CLOUD_VGG, savings.communication_saving)
    theirs = f"{_published(CLOUD_VGG)} of the time, {sent} of the communication"
    return Finding(order and min(shorter) > 0.5, theirs, summary)


def transformers_on_google_cloud(results: Results) -> Finding:
    times = printed(savings.FILES["fig10"], "slowdown_of_summa_vs_best_baseline")
    found = _in_both(_cloud, results, f"small: data parallelism; large: {_published([LARGE])}, about {times:g} times")
    slow = _large(LARGE_SLOW.seconds(results, steps))[1]
    return Finding(found.holds, found.published, f"{found.simulated}; large with {LARGE_SLOW.gb_s} GB/s: {slow}")


def _cloud(results: Results, pick: Pick) -> Judged:
    small = SMALL.chosen(results, OURS, pick)
    right, large = _large(LARGE.seconds(results, steps, pick))
    if small is None:
        return False, "the small model does not fit"
    others = {numbers for numbers in small.strategy.values() if any(part > 1 for part in numbers[2:])}
    plain = "data parallelism" if not others else f"p1 or p2 > 1 in some products, as {sorted(others)[0]}"
    return right and not others, f"small: {plain}; large: {large}"


def _large(seconds: dict[str, float]) -> Judged:
    if not {OURS, MEGATRON, SUMMA} <= seconds.keys():
        return False, "does not fit"
    shorter = 1 - seconds[OURS] / seconds[MEGATRON]
    slower = seconds[SUMMA] / min(seconds[MEGATRON], seconds.get(PARALLEL, float("inf")))
    text = f"{100 * shorter:.1f} % saved against Megatron, SUMMA {slower:.1f} times slower"
    return 0.02 <= shorter <= 0.2 and slower > 3, text


def with_pipeline_stages(results: Results) -> Finding:
    theirs = [1 - row.published("time", "AutoDDL") / row.published("time", "Megatron") for row in STAGED]
    stages = ", ".join(f"{row.published('optimal_pipeline_stages', 'AutoDDL'):g}" for row in STAGED)
    return _in_both(_staged, results, f"{_percents(theirs)} saved; {stages} stages", "smallest", smallest)


def _staged(results: Results, pick: Pick) -> Judged:
    parts, right = [], True
    for row in STAGED:
        ours, his = row.times(results, "autoddl", pick), row.times(results, "megatron", pick)
        if not (any(ours.values()) and any(his.values())):
            raise MissingData(f"{row.title} does not fit, with any number of stages")
        best, other = (min((s, n) for n, s in times.items() if s) for times in (ours, his))
        shorter, wanted = 1 - best[0] / other[0], row.published("optimal_pipeline_stages", "AutoDDL")
        right &= 0.2 <= shorter <= 0.5 and best[1] == other[1] == wanted
        parts.append(f"{row.title}: {100 * shorter:.1f} % saved, {best[1]} and {other[1]} stages")
        like = [times[int(wanted)] for times in (ours, his)]
        if like[0] and like[1]:
            parts[-1] += f" ({_percents([1 - like[0] / like[1]])} with the paper's {wanted:g})"
    return right, "; ".join(parts)


# -- both protocols, and what a text consists of ----------------------------------------------------------------------


def _in_both(
    judge: Callable[[Results, Pick], Judged],
    results: Results,
    published: str,
    name: str = "largest",
    pick: Pick = largest,
) -> Finding:
    """The finding in the paper's protocol, `pick`; the text says what the other would say."""
    own, other = judge(results, pick), judge(results, fastest)
    says = "holds" if other[0] else "does not hold"
    text = f"the {name} micro-batches: {own[1]}. The fastest ones ({says}): {other[1]}"
    return Finding(own[0], published, text)


def _seconds(results: Results, settings: Sequence[Setting], of: Callable[[Row], float]) -> list[dict[str, float]]:
    """A figure of each scheme in each setting. Raises MissingData if one that the claim compares does not fit."""
    seconds = [setting.seconds(results, of) for setting in settings]
    missing = [
        f"{name} ({setting.title})"
        for setting, one in zip(settings, seconds, strict=True)
        for name in (OURS, MEGATRON, PARALLEL)
        if name not in one
    ]
    if missing:
        raise MissingData(f"does not fit: {', '.join(missing)}")
    return seconds


def of_settings(settings: Sequence[Setting]) -> tuple[Need[Row]]:
    """The points of settings, all of one sweep; that a scheme does not fit is a result, too."""
    models = {setting.model for setting in settings}
    return (Need(settings[0].sweep, keep=lambda row: row["model"] in models, ok=False),)


def _saved(seconds: dict[str, float]) -> float | None:
    """Against the best of the others that fit."""
    others = [seconds[name] for name in BASELINES if name in seconds]
    return 1 - seconds[OURS] / min(others) if others and OURS in seconds else None


def _not_fitting(settings: Sequence[Setting], seconds: Sequence[dict[str, float]]) -> str:
    """Schemes that do not fit."""
    names = [
        f"{name} ({setting.title})"
        for setting, one in zip(settings, seconds, strict=True)
        for name in (*BASELINES, OURS, MIXED)
        if name not in one
    ]
    return f"; does not fit or divide: {', '.join(names)}" if names else ""


def _published(settings: Sequence[Setting], of: Callable[[Setting], float | None] = savings.step_saving) -> str:
    """Return the savings of AutoDDL that the paper prints."""
    return ", ".join("-" if (one := of(setting)) is None else f"{one:g}" for setting in settings) + " %"


def _percents(shares: Sequence[float | None]) -> str:
    return ", ".join("-" if share is None else f"{100 * share:.1f}" for share in shares) + " %"


def _list(figures: Sequence[float]) -> str:
    return ", ".join(f"{figure:.2f}" for figure in figures)
