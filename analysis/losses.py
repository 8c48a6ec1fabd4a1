"""Loss curves of several runs in one picture, and how far they are apart:

    python -m analysis.losses RUN_DIR [RUN_DIR ...] --out FILE.png [--titles "A,B"] [--level "unigram entropy=3.26"]

    loss        |\\___  - - - - - -   a line for each run, the first one the widest; a level is dashed
                |    \\_________
    difference  |  _____-----~~~     of each other run from the first one, |a - b| / max(|a|, |b|), logarithmic
                +---------------- step

A sweep's folder stands for all its points, in the order in which they began. Steps count from 0, warm-up included; what
only some runs have is not compared.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.runs import NoRun, listed, load, titled
from harness import files
from harness.training import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#BBBBBB", "#56B4E9", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#333333")
"""Grey for the first run, then Okabe and Ito's palette, which colour-blind readers can tell apart."""
DPI = 100
_WIDTH_PX, _HEIGHT_PX = 1200, 700
_WIDEST_PT, _NARROWEST_PT = 8.0, 1.0
"""Lines get narrower from run to run, so that equal curves are seen one on the other."""
_ALONE_PT, _OF_DIFFERENCES_PT = 1.5, 2.5
"""The width of a single run's line, and the most for one of differences."""


@dataclass(frozen=True)
class Curve:
    """A run's loss in each step."""

    title: str
    losses: tuple[float, ...]

    def differences(self, first: Curve) -> list[float]:
        """Relative, in each step that both have: |a - b| / max(|a|, |b|), and 0 where both are 0."""
        pairs = zip(self.losses, first.losses, strict=False)
        return [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs]


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 where nothing could be drawn; says why on stderr."""
    parser = argparse.ArgumentParser("python -m analysis.losses", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.png")
    parser.add_argument("--titles", type=listed, metavar='"A,B"', help="one for each run, in place of what differs")
    parser.add_argument("--level", type=_level, action="append", default=[], metavar="NAME=VALUE", dest="levels",
                        help="a horizontal line; may be given several times")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        found = curves(options.folders, options.titles)
        draw(found, options.out, options.levels)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*report(found), f"{options.out}: {len(found)} runs"]))
    return 0


def curves(folders: Sequence[Path], titles: Sequence[str] | None = None) -> list[Curve]:
    """The curves of all runs; `titles` are those of the runs, in order.

    Raises ValueError with a line for each folder and each run without losses, and where `titles` are not as many as
    the runs.
    """
    runs, losses, missing = [], [], []
    for folder in folders:
        try:
            for run in load(folder):
                losses.append(_losses(run.folder / METRICS))
                runs.append(run)
        except ValueError as error:
            missing.append(str(error))
    if missing:
        raise ValueError("\n".join(missing))
    return [Curve(*pair) for pair in zip(titled(runs, titles), losses, strict=True)]


def report(curves: Sequence[Curve]) -> list[str]:
    """A line for each run: steps, first and last loss, and its largest difference from the first run."""
    width = max(len(curve.title) for curve in curves)
    lines = [f"{'run':{width}}  steps  first loss   last loss  largest difference from the first run"]
    for number, curve in enumerate(curves):
        lines.append(f"{curve.title:{width}}  {len(curve.losses):5}  {curve.losses[0]:10.6f}  {curve.losses[-1]:10.6f}")
        if number:
            differences = curve.differences(curves[0])
            largest = max(differences)
            lines[-1] += f"  {largest:.2e} at step {differences.index(largest)}" if largest else "  none"
    return lines


def draw(curves: Sequence[Curve], path: Path, levels: Sequence[tuple[str, float]] = ()) -> None:
    """Write the picture to `path` as a PNG, 1200 x 700 pixels."""
    buffer = io.BytesIO()
    figure(curves, levels).savefig(buffer, format="png", dpi=DPI)
    files.write_bytes(path, buffer.getvalue())


def figure(curves: Sequence[Curve], levels: Sequence[tuple[str, float]] = ()) -> Figure:
    """Losses above; below, where there are several runs, their differences from the first one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(_WIDTH_PX / DPI, _HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    several = len(curves) > 1
    panels = drawn.subplots(1 + several, 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: 1 + several])[:, 0]
    _draw_losses(panels[0], curves, levels)
    if several:
        _draw_differences(panels[1], curves)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    for panel in panels:
        panel.grid(color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return drawn


def _draw_losses(axes: Axes, curves: Sequence[Curve], levels: Sequence[tuple[str, float]]) -> None:
    for number, curve in enumerate(curves):
        axes.plot(curve.losses, label=curve.title, **_style(number, len(curves)))
    for name, value in levels:
        axes.axhline(value, color="black", linewidth=1.2, linestyle="--")
        axes.annotate(f"{name} {value:g}", (1, value), (-4, 4), xycoords=axes.get_yaxis_transform(),
                      textcoords="offset points", ha="right", parse_math=False)  # fmt: skip
    axes.set_ylabel("loss")
    axes.margins(x=0.01)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)


def _draw_differences(axes: Axes, curves: Sequence[Curve]) -> None:
    """A logarithmic axis cannot show 0: there a curve has a gap."""
    for number, curve in enumerate(curves[1:], start=1):
        differences = [difference or float("nan") for difference in curve.differences(curves[0])]
        style = _style(number, len(curves))
        axes.plot(differences, **{**style, "linewidth": min(style["linewidth"], _OF_DIFFERENCES_PT)})
    axes.set_yscale("log")
    axes.set_ylabel("difference from\nthe first run")


def _style(number: int, count: int) -> dict[str, Any]:
    narrower = (_WIDEST_PT - _NARROWEST_PT) * number / max(1, count - 1)
    return {"color": COLOURS[number % len(COLOURS)], "linewidth": _WIDEST_PT - narrower if count > 1 else _ALONE_PT}


def _losses(path: Path) -> tuple[float, ...]:
    try:
        found = tuple(float(json.loads(line)["loss"]) for line in path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        raise NoRun(f"{path}   is not there   -> a run with mode=run") from None
    except (ValueError, KeyError, TypeError) as error:
        raise NoRun(f"{path}   cannot be read: {error}   -> run it again") from error
    if not found:
        raise NoRun(f"{path}   has 0 steps: its run ended before the first one   -> run it again")
    return found


def _level(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    if not name.strip():
        raise argparse.ArgumentTypeError(f'{text!r} has no name, as in "unigram entropy=3.26"')
    try:
        return name.strip(), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} of {name} is no number") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
