"""What a docstring says of its function's parameters, in the styles of Google, NumPy and Sphinx.

Args:                          Parameters                      :param width: numbers of a layer
  width: numbers of a layer    ----------                      :param int depth: layers
                               width : int
                                   numbers of a layer
"""

from __future__ import annotations

import inspect
import re

GOOGLE = re.compile(r"(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments):\s*$")
GOOGLE_ITEM = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:(?:\s+(.*)|$)")
NUMPY = re.compile(r"(Parameters|Other Parameters|Args|Arguments)\s*$")
NUMPY_ITEM = re.compile(r"(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
SPHINX = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")


def first_line(docstring: str | None) -> str:
    """The first paragraph in one line; "" without a docstring."""
    return " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())


def parameters(docstring: str | None) -> dict[str, str]:
    """Return the text of each parameter that a docstring describes, in one line."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if GOOGLE.match(line):
            found |= _google(lines[number + 1 :])
        elif NUMPY.match(line) and re.fullmatch(r"-{3,}\s*", below):
            found |= _numpy(lines[number + 2 :])
        elif match := SPHINX.match(line.strip()):
            found[match[1]] = [match[2], *_deeper(lines[number + 1 :], _indent(line))]
    texts = {name: " ".join(" ".join(text).split()) for name, text in found.items()}
    return {name: text for name, text in texts.items() if text}


def _google(lines: list[str]) -> dict[str, list[str]]:
    """Items that are at one indent; what is deeper belongs to the one above."""
    found: dict[str, list[str]] = {}
    items = 0
    text: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        indent = _indent(line)
        items = items or indent
        if not indent or indent < items:
            break
        if indent == items and (match := GOOGLE_ITEM.match(line.strip())):
            text = found[match[1]] = [match[2] or ""]
        else:
            text.append(line.strip())
    return found


def _numpy(lines: list[str]) -> dict[str, list[str]]:
    """Names at the margin, each with an indented text below; "width, depth : int" are two with one text."""
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        if number + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[number + 1]):
            break
        if _indent(line) or not (match := NUMPY_ITEM.match(line)):
            continue
        text = _deeper(lines[number + 1 :], 0)
        found |= {name.strip(): text for name in match[1].split(",")}
    return found


def _deeper(lines: list[str], margin: int) -> list[str]:
    """The lines at the beginning that are indented deeper than a margin."""
    text = []
    for line in lines:
        if line.strip() and _indent(line) <= margin:
            break
        text.append(line.strip())
    return text


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
