"""The command that makes the report page, and the page of all claims that it makes."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from analysis import paper_pages
from analysis.page.__main__ import main
from tests.analysis.page import browser
from tests.analysis.page.test_page import chromium

pytestmark = pytest.mark.usefixtures("browser")


@dataclass(frozen=True)
class Made:
    """What the command wrote, and what it printed."""

    path: Path
    printed: str
    progress: list[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """All papers, without their figures, which take most of the time."""
    path, out, errors = tmp_path_factory.mktemp("report") / "report.html", io.StringIO(), io.StringIO()
    bare = {name: replace(page, figures={}) for name, page in paper_pages.PAGES.items()}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        patch.setattr(paper_pages, "PAGES", bare)
        assert main(["--out", str(path)]) == 0
    return Made(path, out.getvalue(), errors.getvalue().splitlines())


def test_it_says_what_it_does_a_line_each(made: Made) -> None:
    for number, name in enumerate(paper_pages.PAGES):
        reading, checking = made.progress[2 * number : 2 * number + 2]
        assert reading == f"reading  the records of {name}"
        assert re.fullmatch(rf"checking  the claims of {name}, [1-9]\d* records", checking)
    assert [line.split()[0] for line in made.progress[8:]] == ["reading", "drawing", "writing"]
    assert made.progress[-1].endswith(str(made.path)) and made.printed.startswith(f"{made.path}: ")


def test_every_link_leads_to_a_file_or_a_place_of_the_page(made: Made) -> None:
    text = made.path.read_text(encoding="utf-8")
    links = re.findall(r'<a [^>]*href="([^"]*)"', text)
    places = [link[1:] for link in links if link.startswith("#")]
    tests = [link.partition("#") for link in links if not link.startswith("#")]
    assert places and all(f' id="{place}"' in text for place in places)
    assert len(tests) >= 20 and all((made.path.parent / file).is_file() for file, _, _ in tests)
    assert sum(line.startswith("L") for _, _, line in tests) >= 19
    unlinked = re.findall(r"(?<!>)tests/<wbr>[\w/<>]*\.py", text.partition("<body>")[2])
    assert not unlinked


@chromium
def test_every_closed_claim_has_at_most_four_lines(made: Made) -> None:
    found = browser.run(
        made.path,
        """
        const line = (one) => parseFloat(getComputedStyle(one.querySelector("summary")).lineHeight);
        return {lines: [...document.querySelectorAll(".claim")].map((one) =>
            [one.id, one.getBoundingClientRect().height / line(one)])};""",
    )
    assert found["errors"] == [] and len(found["lines"]) == 48
    assert [name for name, lines in found["lines"] if not 1 <= lines <= 4] == []


@chromium
@pytest.mark.parametrize("opened", [False, True])
def test_nothing_scrolls_sideways_at_800_pixels(made: Made, opened: bool) -> None:
    opening = 'document.querySelectorAll("details").forEach((one) => { one.open = true; });' if opened else ""
    script = f"{opening} return {{wide: document.documentElement.scrollWidth, window: innerWidth}};"
    found = browser.run(made.path, script, width=800)
    assert found["errors"] == [] and found["wide"] <= found["window"] == 800
