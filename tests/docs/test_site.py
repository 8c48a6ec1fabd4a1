"""The documentation as a site: it is built strictly and without a network, and its pages of keys have every key."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import key_pages
from harness.checks import other_frameworks
from harness.cli import help
from harness.config import registry


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """The site of the documentation in `root`, built into root/build/site."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml")]
    return subprocess.run(command, cwd=registry.ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("site")
    shutil.copytree(registry.ROOT / "docs", root / "docs")
    shutil.copy2(registry.ROOT / "mkdocs.yml", root)
    return root


@pytest.fixture(scope="module")
def site(root: Path) -> Path:
    done = build(root)
    assert done.returncode == 0, done.stderr
    return root / "build/site"


def test_every_page_is_there(site: Path) -> None:
    pages = {path.relative_to(registry.ROOT / "docs") for path in (registry.ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not (site / page).with_suffix(".html").is_file()} == set()


def test_it_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert [found for page in site.rglob("*.html") for found in loaded.findall(page.read_text())] == []


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("page", "added"),
    [
        ("index.md", "\n[nowhere](tutorials/no_such_page.md)\n"),
        ("index.md", "\n[no such section](architecture.md#no-such-section)\n"),
        ("howto/a_page_without_a_place.md", "# A page that the navigation lacks\n"),
    ],
)
def test_a_broken_link_and_a_page_without_a_place_fail(root: Path, page: str, added: str) -> None:
    path = root / "docs" / page
    before = path.read_text() if path.exists() else None
    path.write_text((before or "") + added)
    try:
        done = build(root)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert done.returncode != 0
    assert page in done.stdout + done.stderr


def test_the_pages_of_keys_have_what_help_has() -> None:
    pages = dict(key_pages.pages())
    assert set(pages) == {*registry.GROUPS, "other"}
    names = re.findall(r"^ {4}([a-z_]+(?:\.[\w.]+)?)=", help.text([help.ALL]), re.MULTILINE)
    assert len(names) > 100
    assert [name for name in names if not any(f"| `{name}` |" in page for page in pages.values())] == []
    for group, choices, _ in help.groups():
        assert [one.name for one in choices if f"| `{one.name}` |" not in pages[group]] == []


def test_names_of_other_frameworks_are_in_the_pages_of_keys() -> None:
    page = dict(key_pages.pages())["other"]
    for row in other_frameworks.ROWS:
        names = ", ".join(f"`{name}`" for name in row.names)
        assert f"| {names} | {row.frameworks} | {row.meaning} | `{row.key}`" in page
    for names in other_frameworks.ENGINES:
        assert f"| `{names[0]}`" in page
