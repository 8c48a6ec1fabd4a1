"""The papers' figures: bars and lines are the records' figures, axes have units, and what was not run is not drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from analysis.autoddl import plots
from analysis.autoddl import sweep_results as autoddl_rows
from analysis.madpipe import plots as madpipe_plots
from analysis.madpipe import sweep_results as madpipe_rows
from analysis.match_records import points_of
from analysis.myelin import plots as myelin_plots
from analysis.myelin import quantities
from analysis.myelin import sweep_results as myelin_rows
from analysis.paper_pages import PAGES
from analysis.torchgpipe import plots as torchgpipe_plots
from analysis.torchgpipe import sweep_results as torchgpipe_rows
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.record import RunRecord
from tests.analysis.autoddl.published import as_published
from tests.analysis.madpipe import published as madpipe_published
from tests.analysis.myelin import published as myelin_published

FIGURES: dict[str, tuple[str, ...]] = {
    "torchgpipe": ("table1", "table2", "table4", "fig7"),
    "myelin": ("fig5", "fig6", "fig8", "fig9", "fig10", "fig11"),
    "madpipe": ("fig6", "fig7", "fig8"),
    "autoddl": ("fig3", "fig4", "fig7", "fig8", "fig9", "fig10"),
}


@pytest.fixture(scope="module")
def of_myelin(tmp_path_factory: pytest.TempPathFactory) -> myelin_rows.Results:
    folder = tmp_path_factory.mktemp("run")
    ModelProfile((LayerProfile(param_bytes=4),)).save(folder / "profile.json")
    (folder / "metrics.jsonl").write_text('{"loss": 3.5}\n{"loss": 3.0}\n')
    return myelin_rows.Results(myelin_published.records(folder))


@pytest.fixture(scope="module")
def of_madpipe() -> madpipe_rows.Results:
    return madpipe_rows.Results(madpipe_published.records())


@pytest.fixture(scope="module")
def of_autoddl() -> autoddl_rows.Results:
    return autoddl_rows.Results(as_published())


def simulated(table: int) -> list[RunRecord]:
    """torchgpipe's rows of a table: the n-th one does n + 1 samples a second."""
    metrics = [
        {"throughput": number + 1.0, "utilization": [0.5], "peak_memory_bytes": [2**30]}
        for number in range(len(torchgpipe_rows.ROWS[table]))
    ]
    points = points_of(f"torchgpipe_table{table}", "paper")
    return [
        RunRecord("x", "ok", "simulated", metrics=own, manifest={"overrides": list(point.overrides)})
        for point, own in zip(points, metrics, strict=False)
    ]


def heights(figure: Figure | None, panel: int = 0) -> list[list[float]]:
    """Of each series of bars."""
    assert figure
    return [[bar.get_height() for bar in bars] for bars in figure.axes[panel].containers]


def lines(figure: Figure | None, panel: int = 0) -> list[list[float]]:
    assert figure
    return [[float(y) for y in line.get_ydata()] for line in figure.axes[panel].get_lines()]


def test_all_figures_of_the_papers_are_there() -> None:
    assert {paper: set(page.figures) for paper, page in PAGES.items()} == {
        paper: {f"{paper}_{name}" for name in names} for paper, names in FIGURES.items()
    }


@pytest.mark.parametrize("figures", [myelin_plots.FIGURES, madpipe_plots.FIGURES, plots.FIGURES])
def test_nothing_is_drawn_of_what_was_not_run(figures: Mapping[str, Callable[[Any], Figure | None]]) -> None:
    results: Any = {
        id(myelin_plots.FIGURES): myelin_rows.Results, id(madpipe_plots.FIGURES): madpipe_rows.Results,
        id(plots.FIGURES): autoddl_rows.Results,
    }[id(figures)]([])  # fmt: skip
    assert {name: draw(results) for name, draw in figures.items()} == dict.fromkeys(figures)


@pytest.mark.usefixtures("computation")
def test_every_axis_says_what_it_has_and_there_is_one_legend(
    of_myelin: myelin_rows.Results, of_madpipe: madpipe_rows.Results, of_autoddl: autoddl_rows.Results
) -> None:
    drawn = {
        name: draw(results)
        for figures, results in ((myelin_plots.FIGURES, of_myelin), (madpipe_plots.FIGURES, of_madpipe),
                                 (plots.FIGURES, of_autoddl))
        for name, draw in figures.items()  # type: ignore[attr-defined]
    }  # fmt: skip
    for name, figure in drawn.items():
        assert figure, name
        assert figure.axes[0].get_ylabel(), name
        assert len(figure.legends) + sum(axes.get_legend() is not None for axes in figure.axes) == 1, name


def test_torchgpipes_tables_have_the_papers_figures_next_to_ours() -> None:
    results = torchgpipe_rows.Results([*simulated(1), *simulated(4)])
    assert heights(torchgpipe_plots.table1(results))[1] == [1.0, 2.0, 3.0, 4.0]
    assert heights(torchgpipe_plots.table1(results))[0] == [1.0, 1.347, 1.8, 1.907]
    paper, ours = heights(torchgpipe_plots.table4(results))
    assert paper[0] == 28.5 and ours == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert torchgpipe_plots.table2(results) is None


def test_torchgpipes_figure_7_has_the_four_rows_of_table_1(monkeypatch: pytest.MonkeyPatch) -> None:
    results = torchgpipe_rows.Results([])
    assert torchgpipe_plots.fig7(results) is None
    monkeypatch.setattr(results, "has_rows", lambda table: table == 1)
    figure = torchgpipe_plots.fig7(results)
    assert figure
    written = [text.get_text() for text in figure.axes[0].texts]
    assert [row for row in torchgpipe_rows.ROWS[1] if f"{row}, simulated" in written] == [*torchgpipe_rows.ROWS[1]]


def test_myelins_figures_have_what_the_records_say(of_myelin: myelin_rows.Results) -> None:
    phases = [row.phase_s("pipelining") for row in of_myelin.good("fig5")]
    assert heights(myelin_plots.fig5(of_myelin))[1] == phases
    days = [quantities.days(row) for row in of_myelin.good("fig10") if row.framework == myelin_rows.DEEPSPEED]
    assert heights(myelin_plots.fig10(of_myelin))[3] == days
    tails = [quantities.tail_s(row) for row in of_myelin.good("fig8") if row["engine.k"] != "0"]
    assert lines(myelin_plots.fig8(of_myelin))[1] == pytest.approx(tails)
    assert lines(myelin_plots.fig9(of_myelin))[0] == [3.5, 3.0]


def test_madpipes_ratios_are_means_and_where_nothing_fits_is_a_gap(of_madpipe: madpipe_rows.Results) -> None:
    contiguous, *pipedream = lines(madpipe_plots.fig7(of_madpipe))[:5]
    assert contiguous == pytest.approx([1.3 / 1.2] * 14)
    assert all(own == pytest.approx([2.0] * 14) for own in pipedream)
    assert not any(math.isnan(period) for period in lines(madpipe_plots.fig6(of_madpipe))[0])


def test_autoddls_searches_are_medians_above_the_optimum(of_autoddl: autoddl_rows.Results) -> None:
    descent, chain, drawn, optimum = lines(plots.fig8(of_autoddl))
    assert (descent[-1], chain[-1], drawn[-1]) == (1.0, 1.05, 1.3) and set(optimum) == {1.0}


def test_autoddls_schemes_are_steps_with_the_papers_saving_marked(of_autoddl: autoddl_rows.Results) -> None:
    figure = plots.fig9(of_autoddl)
    assert figure
    first = figure.axes[0]
    tops = [bars[0].get_y() + bars[0].get_height() for bars in first.containers[1::2]]
    assert tops == pytest.approx([4.004, 1.1011, 9.009, 1.001, 0.9009], rel=1e-3)
    assert first.get_title() == "VGG13, 16 nodes (paper: 3 % saved)"
    assert lines(figure)[0] == pytest.approx([1.1011 * 0.97] * 2, rel=1e-3)


def test_pictures_are_written(of_autoddl: autoddl_rows.Results, tmp_path: Path) -> None:
    from analysis.plots.style import save

    assert save({"autoddl_fig3": plots.fig3}, of_autoddl, tmp_path) == ["autoddl_fig3"]
    assert (tmp_path / "autoddl_fig3.png").stat().st_size > 5_000
