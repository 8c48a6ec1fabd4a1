"""Names of tests as links."""

from __future__ import annotations

import re

import pytest

from analysis.page.links import TEST, linked
from analysis.paper_pages import PAGES
from harness.config.registry import ROOT

HERE = "tests/analysis/page/test_links.py"


def test_a_test_is_a_link_to_its_line() -> None:
    name = "test_a_test_is_a_link_to_its_line"
    found = linked(f"<exact> in {HERE}::{name} & more", ROOT / "build")
    address = re.search(rf'&lt;exact&gt; in <a href="\.\./{HERE}#L(\d+)">tests/<wbr>.*</a> &amp; more$', found)
    assert address
    line = (ROOT / HERE).read_text(encoding="utf-8").splitlines()[int(address[1]) - 1]
    assert line.startswith(f"def {name}(")


def test_a_file_of_tests_is_a_link_without_a_line() -> None:
    assert f'href="{HERE}"' in linked(f"exact in {HERE}", ROOT)


@pytest.mark.parametrize("name", ["tests/not/there.py::test_it", f"{HERE}::test_that_is_not_there"])
def test_what_is_not_there_is_no_link(name: str) -> None:
    shown = linked(f"{name} <", ROOT)
    assert "<a" not in shown and shown.replace("<wbr>", "") == f"{name} &lt;"


@pytest.mark.parametrize("paper", PAGES)
def test_every_test_of_every_claim_is_there(paper: str) -> None:
    page = PAGES[paper]
    reasons = [one.reason for one in page.verdicts(page.results([]))]
    names = [name[0] for reason in reasons for name in TEST.finditer(reason)]
    assert names and all("<a href" in linked(name, ROOT) for name in names)
