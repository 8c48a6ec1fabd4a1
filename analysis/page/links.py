"""Names of tests in a text, as links to the lines of this repository where they are defined."""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path

from markupsafe import Markup, escape

from harness.config.registry import ROOT

TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")


def linked(text: str, folder: Path) -> Markup:
    """The text as HTML for a page in `folder`: a test that exists is a link, and every test's name may break."""
    parts, end = [], 0
    for name in TEST.finditer(text):
        parts += [escape(text[end : name.start()]), _link(name, folder)]
        end = name.end()
    return Markup("").join([*parts, escape(text[end:])])


def _link(name: re.Match[str], folder: Path) -> Markup:
    shown = Markup(re.sub(r"(::|[/_])", r"\1<wbr>", name[0]))
    path = ROOT / name[1]
    line = _lines(path).get(name[2]) if path.is_file() and name[2] else None
    if not path.is_file() or (name[2] and line is None):
        return shown
    address = Path(os.path.relpath(path, folder)).as_posix() + (f"#L{line}" if line else "")
    return Markup('<a href="{}">{}</a>').format(address, shown)


@functools.cache
def _lines(path: Path) -> dict[str, int]:
    """The line of each function in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {one.name: one.lineno for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
