"""Hooks of mkdocs: the pages of all keys, made from the same docstrings as `python run.py --help all`, and of
the names that they have in other frameworks."""

from __future__ import annotations

from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from harness.checks.other_frameworks import ENGINES, ROWS
from harness.cli import help
from harness.core.problem import typed

FOLDER = "reference/keys"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each group, and one for the keys of no group."""
    for name, text in pages():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """The name of each page and its text."""
    for group, choices, owned in help.groups():
        lines = [f"# Keys: {group}", "", f"Values of `{group}=`, each a file in conf/{group}:", ""]
        lines += [
            "| choice | what it is |",
            "|---|---|",
            *(f"| `{one.name}` | {_cell(one.meaning)} |" for one in choices),
        ]
        for owner, keys in owned.items():
            lines += ["", f"## With {owner}", "", *_table(keys)]
        yield group, "\n".join(lines) + "\n"
    yield "other", "\n".join(["# Keys of no group", "", *_table(help.other_keys()), *_names_elsewhere()]) + "\n"


def _names_elsewhere() -> Iterator[str]:
    """The tables of `harness.checks.other_frameworks`."""
    yield from ("", "## Names in torchgpipe, Megatron-LM, DeepSpeed and Regatta", "")
    yield from ("Typed as a key, a name of another framework gets the key of this project as a suggestion.", "")
    yield from ("| name | in | what it is | here |", "|---|---|---|---|")
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.names)
        yield f"| {names} | {row.frameworks} | {row.meaning} | `{row.key}`{row.note and f': {row.note}'} |"
    yield from ("", "| `engine=` elsewhere | here |", "|---|---|")
    for engines, fixes in ENGINES.items():
        yield f"| {', '.join(f'`{name}`' for name in engines)} | {', '.join(f'`{typed(fix)}`' for fix in fixes)} |"


def _table(keys: list[help.Entry]) -> list[str]:
    rows = [f"| `{key.name}` | `{_cell(key.default or '')}` | {_cell(key.meaning)} |" for key in keys]
    return ["| key | default | meaning |", "|---|---|---|", *rows]


def _cell(text: str) -> str:
    """A text without what ends a cell of a table or begins markup."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
