"""What notebooks and the report page get of a paper."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from analysis import paper_pages
from analysis.claim_check import Verdict
from analysis.paper_pages import PAGES, Missing, Picture, Report, Tables
from analysis.plots import style
from analysis.report import Section


@pytest.fixture
def report() -> Report:
    tables = [Section(title, ("row", "s"), (("<a>", "1"),)) for title in ("Table I: one", "Table I, small", "Table II")]
    figures = {"drawn": lambda results: style.panels(1, 1, 3, 2)[0] if results else None, "not": lambda results: None}
    page = replace(PAGES["myelin"], figures=figures)
    return Report("Myelin", ["1 record"], tables, [Verdict("MY-1", "it is", "holds")], "Not run yet: b", [1], page)


def test_tables_are_found_by_the_first_words_of_their_titles(report: Report) -> None:
    found = report.tables("Table I")
    assert isinstance(found, Tables)
    assert [section.title for section in found.sections] == ["Table I: one", "Table I, small"]
    assert "<td>&lt;a&gt;</td>" in found._repr_html_()


def test_what_was_not_run_says_so(report: Report) -> None:
    assert report.tables("Table III") == Missing("Table III", "Not run yet: b")
    assert report.picture("not") == Missing("not", "Not run yet: b")
    shown = Missing("<x>", "Not run:\n\n    run it")._repr_html_()
    assert shown == "<p>&lt;x&gt; has not been run.</p>\n<p>Not run:</p>\n<pre>    run it</pre>"


def test_a_picture_is_a_png_of_its_size(report: Report) -> None:
    picture = report.picture("drawn")
    assert isinstance(picture, Picture)
    with Image.open(io.BytesIO(picture._repr_png_())) as image:
        assert image.size == (picture.width, picture.height) == (300, 200)
    assert [*report.pictures()] == ["drawn"]


def test_claims_are_a_table(report: Report) -> None:
    assert report.claims().rows[0][:2] == ("MY-1", "holds")


def test_a_report_is_made_of_the_committed_records() -> None:
    report = paper_pages.report("torchgpipe")
    assert report.title == "torchgpipe" and len(report.verdicts) == 15
    assert isinstance(report.tables("Table 1"), Tables)
