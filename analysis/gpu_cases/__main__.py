"""Predicted and published training speeds of GPUs, of GPTs and of convolutional nets: `python -m analysis.gpu_cases`.

    publication  GPU      cases           n   error: median  worst   predicted / measured
    llm-foundry  h100     fitted to      36           3.1 %  11 %                    1.00
    llm-foundry  h100     held back      34           2.7 %  18 %                    0.99

The numbers of the clusters are fitted to half of the cases (`--fit` does it again, in some minutes, and prints the keys
of each cluster). The other half is held back by the hash of a case's name, as are all cases of Megatron. `--all` lists
every case, the worst first. Below the table are the orders of the schemes of publications that compare some.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.gpu_cases import cases, fit, fit_images, image_cases, predict, predict_images
from analysis.gpu_cases.cases import Case
from analysis.gpu_cases.image_cases import ImageCase
from harness.core.units import percent, ratio, seconds

WIDTH = 120
"""Columns of a table in a file."""
Found = Sequence[tuple[Case | ImageCase, float]]
"""Cases and their predicted / measured step time."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m analysis.gpu_cases", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--fit", action="store_true", help="fit the numbers again and print them")
    parser.add_argument("--all", action="store_true", help="list every case, the worst first")
    chosen = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if chosen.fit:
        for of, models in ((fit, "GPTs"), (fit_images, "convolutional nets")):
            for gpu, clusters in of.GPUS.items():
                keys = " ".join(f"cluster.{key}={value:.4g}" for key, value in of.fit(gpu).items())
                console.print(f"{gpu} ({', '.join(clusters)}), {models}: {keys}", soft_wrap=True)
        return
    gpts = [(case, predict.step_s(case) / case.step_s) for case in cases.load()]
    nets = [(case, predict_images.step_s(case) / case.step_s) for case in image_cases.load()]
    found: Found = [*gpts, *nets]
    console.print(summary(found))
    if chosen.all:
        console.print(listed(found))
    for line in orders(gpts):
        console.print(Text(line), soft_wrap=True)


def error(of: float) -> float:
    """Returns the error of a prediction, of predicted / measured."""
    return abs(of - 1)


def summary(found: Found) -> Table:
    """Returns the errors of each publication and GPU, of the cases that were fitted to and of those that were not."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for case, of in found:
        groups[case.publication, case.gpu, "fitted to" if case.is_fitted else "held back"].append(of)
    table = _table("publication", "GPU", "cases", ">n", ">error: median", ">worst", ">predicted / measured")
    for key, ratios in sorted(groups.items()):
        off = sorted(map(error, ratios))
        row = (str(len(off)), percent(statistics.median(off)), percent(off[-1]), ratio(statistics.median(ratios), 1.0))
        table.add_row(*key, *row)
    return table


def listed(found: Found) -> Table:
    """Returns a row for each case, the worst first."""
    table = _table("case", "", ">measured", ">predicted", ">predicted / measured")
    for case, of in sorted(found, key=lambda one: -error(one[1])):
        fitted = "fitted to" if case.is_fitted else "held back"
        table.add_row(case.name, fitted, seconds(case.step_s), seconds(of * case.step_s), ratio(of, 1.0))
    return table


def orders(found: Sequence[tuple[Case, float]]) -> Iterator[str]:
    """Yields the orders of the speeds of schemes that train one model, on growing numbers of GPUs."""
    models: dict[str, dict[str, list[tuple[Case, float]]]] = defaultdict(lambda: defaultdict(list))
    for case, of in found:
        if case.compared:
            model, scheme = case.compared
            models[model][scheme].append((case, of))
    for model, schemes in models.items():
        for runs in zip(*schemes.values(), strict=True):
            measured = _order(schemes, [case.tokens_s_device for case, _ in runs])
            predicted = _order(schemes, [case.tokens_s_device / of for case, of in runs])
            gpus = " and ".join(str(count) for count in dict.fromkeys(case.devices for case, _ in runs))
            yield f"{model} on {gpus} GPUs: measured {measured}, predicted {predicted}"


def _order(schemes: Iterable[str], speeds: Sequence[float]) -> str:
    """ZeRO-3 < PTD-P"""
    return " < ".join(scheme for _, scheme in sorted(zip(speeds, schemes, strict=True)))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left", overflow="fold")
    return table


if __name__ == "__main__":
    main()
