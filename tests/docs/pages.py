"""Reads pages of the documentation: the files that they show, their commands, and what these print."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.config import registry

COPIED = ("analysis", "conf", "engines", "harness", "models", "planners", "run.py", "slurm", "sweeps")
_BLOCKS = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILES = re.compile(r"^`([\w/]+\.(?:py|yaml|csv))`.*:\n\n```\w+\n((?:.*\n)*?)```$", re.MULTILINE)
_COMMENT = re.compile(r"\s+#\s.*$")


@dataclass
class Example:
    """The commands of a block "sh" and the lines of the blocks "text" after it: what the commands print."""

    commands: list[str]
    promised: list[str] = field(default_factory=list)


def examples(page: str) -> list[Example]:
    """The examples of a page, in order. A transcript, whose first line begins with "$ ", promises nothing."""
    found: list[Example] = []
    for language, text in _BLOCKS.findall(page):
        if language == "sh":
            lines = "\n".join(_COMMENT.sub("", line) for line in text.splitlines())
            found.append(Example(re.sub(r"\s*\\\n\s*", " ", lines).splitlines()))
        elif language == "text" and found and not text.startswith("$ "):
            found[-1].promised += text.splitlines()
    return found


def scripts(page: str) -> list[str]:
    """The blocks "python" of a page that are no files."""
    shown = set(files(page).values())
    return [text for language, text in _BLOCKS.findall(page) if language == "python" and text not in shown]


def transcripts(page: str) -> list[Example]:
    """The commands of a page's transcripts, each with the lines that it prints there."""
    texts = [text.replace("\\\n", " ") for _, text in _BLOCKS.findall(page) if text.startswith("$ ")]
    parts = [part.splitlines() for text in texts for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
    return [Example([command], promised) for command, *promised in parts]


def files(page: str) -> dict[str, str]:
    """The files that a page shows in full, each after a line that begins with its path and ends with a colon."""
    return dict(_FILES.findall(page))


def copy_sources(root: Path) -> Path:
    """Copies what run.py and the commands need into `root`, which it returns."""
    for name in COPIED:
        source = registry.ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, root / name)
    return root


def write(files: Mapping[str, str], root: Path) -> None:
    """Writes new files into `root`."""
    for name, text in files.items():
        assert not (root / name).exists(), f"{name} is there already"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
