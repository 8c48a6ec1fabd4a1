"""Tables on the terminal, as Markdown, LaTeX and HTML, and as frames."""

from __future__ import annotations

from html.parser import HTMLParser

from rich.console import Console

from analysis import report

SECTION = report.Section("A title", ("row", "paper"), (("one", "1.0"), ("a|b", "22.0")), ("A note.",))
HARD = report.Section("5 % & <more>", ("a_b", "#"), ((r"\x^2~{y}$", "<b>"),), ("x < y & z",), texts=2)


def test_on_the_terminal() -> None:
    with (console := Console(width=40)).capture() as captured:
        report.show([SECTION], console)
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "A title", "row  paper", "one    1.0", "a|b   22.0", "A note.", "",
    ]  # fmt: skip


def test_as_markdown() -> None:
    assert report.markdown("Page", "Made by hand.", [SECTION]) == (
        "# Page\n\nMade by hand.\n\n## A title\n\n"
        "| row | paper |\n| :-- | --: |\n| one | 1.0 |\n| a\\|b | 22.0 |\n\nA note.\n"
    )


def test_as_latex_with_booktabs() -> None:
    assert report.latex("Page", "Made by hand.", [SECTION]) == (
        "% \\usepackage{longtable,booktabs}\n\\section{Page}\n\nMade by hand.\n\n"
        "\\begin{longtable}{lr}\n\\caption{A title}\\\\\n\\toprule\nrow & paper \\\\\n\\midrule\n\\endhead\n"
        "one & 1.0 \\\\\na\\textbar{}b & 22.0 \\\\\n\\bottomrule\n\\end{longtable}\n\nA note.\n"
    )


def test_latex_s_own_letters_are_escaped() -> None:
    text = report.latex("", "", [HARD])
    assert r"\caption{5 \% \& \textless{}more\textgreater{}}\\" in text
    assert r"a\_b & \# \\" in text
    assert r"\textbackslash{}x\textasciicircum{}2\textasciitilde{}\{y\}\$ & \textless{}b\textgreater{} \\" in text


def test_as_html() -> None:
    assert report.html("Page", "", [SECTION]) == (
        '<h1>Page</h1>\n<h2>A title</h2>\n<div class="table">\n<table>\n<thead>\n'
        '<tr><th>row</th><th class="number">paper</th></tr>\n</thead>\n<tbody>\n'
        '<tr><td>one</td><td class="number">1.0</td></tr>\n<tr><td>a|b</td><td class="number">22.0</td></tr>\n'
        "</tbody>\n</table>\n</div>\n<p>A note.</p>\n"
    )


def test_html_says_what_it_was_given() -> None:
    shown: list[str] = []
    parser = HTMLParser()
    parser.handle_data = shown.append  # type: ignore[method-assign]
    parser.feed(report.html("1 < 2", "in & out", [HARD]))
    assert [text for text in shown if text.strip()] == [
        "1 < 2", "in & out", HARD.title, *HARD.columns, *HARD.rows[0], *HARD.notes
    ]  # fmt: skip


def test_as_a_frame() -> None:
    found = SECTION.frame()
    assert list(found.columns) == ["row", "paper"] and found.to_numpy().tolist() == [["one", "1.0"], ["a|b", "22.0"]]


def test_a_percent_sign_stays_next_to_its_number() -> None:
    shown = report.html_section(report.Section("Title", ("", "none, 10 %"), (("a", "5 %"),)))
    assert "none, 10\N{NO-BREAK SPACE}%</th>" in shown and "5\N{NO-BREAK SPACE}%</td>" in shown
