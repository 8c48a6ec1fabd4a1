"""The documentation names only modules and files that exist, and its pages are short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "harness|engines|planners|models|analysis|slurm|tests"
PATHS = re.compile(rf"(?<![\w./-])(?:{PACKAGES})/[\w/]+\.(?:py|md|yaml)\b")
MODULES = re.compile(rf"(?<![\w./-])(?:{PACKAGES})(?:\.\w+)+")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
EXAMPLES = re.compile(r".*[/.](?:mine|NAME|simple_dp|front_heavy|tiny|mycnn)\b")
"""Files that a page says the reader to write."""


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or something that a module defines or imports."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        if place.is_dir() and length == len(parts):
            return True
        file = place.with_suffix(".py") if not place.is_dir() else place / "__init__.py"
        if file.is_file():
            rest = parts[length:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text(encoding="utf-8")) is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_names_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = {path for path in PATHS.findall(text) if not (ROOT / path).exists()}
    modules = {name for name in MODULES.findall(text) if not exists(name)}
    assert {path for path in paths if not EXAMPLES.match(path)} == set()
    modules = {name for name in modules if not EXAMPLES.match(name)}
    assert {name for name in modules if not re.match(r"slurm\.\w+$", name)} == set(), "slurm.* are keys, too"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_is_short(page: Path) -> None:
    most, width = (150, 110) if page.name == "README.md" else (250, 100_000)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= width
