"""The report page, looked at in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from analysis.bench import race_plot
from analysis.claim_check import Verdict
from analysis.page import timeline_traces
from analysis.page.build import page
from analysis.paper_pages import PAGES, Report
from analysis.report import Section
from analysis.torchgpipe.traces import Chosen
from harness.core.trace import Span, Trace
from tests.analysis.page import browser

WINDOW_MS = 100.0
TESTED = "it is not, <see> tests/some/test_it.py::test_this_and_that"
RACE = [
    {"model": "A", "entry": "single", "step": 2.0, "quartiles": [1.9, 2.1], "speed / single": 1.0},
    {"model": "A", "entry": "gpipe", "step": 1.0, "quartiles": [0.9, 1.1], "speed / single": 2.0},
    {"model": "A", "entry": "torchgpipe", "step": 1.25, "quartiles": [1.2, 1.3], "speed / single": 1.6},
]
chromium = pytest.mark.skipif(not browser.CHROMIUM, reason="no Chromium: apt-get install chromium")


def trace() -> Trace:
    """Two devices: 0F0 from 0 to 40 ms, then a copy, then 1F0 from 50 to 90 ms."""
    spans = (
        Span("0F0", 0, "compute", 0.0, 0.04),
        Span("1copy0<0", 1, "copy in", 0.04, 0.05),
        Span("1F0", 1, "compute", 0.05, 0.09),
        Span("1step", 1, "compute", 0.09, 0.1),
    )
    return Trace(spans, ((0.0, WINDOW_MS / 1e3),))


def report(name: str, verdicts: list[Verdict]) -> Report:
    tables = [Section("Table 1: <b>", ("row", "a & b"), (("x", "1"),), ("a note",))]
    paper = replace(PAGES[name], figures={f"{name}_table1": race_plot.figure, f"{name}_fig2": lambda results: None})
    return Report(name, ["no records"], tables, verdicts, "Not run yet: fig2", RACE, paper)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reports = {
        "torchgpipe": report("torchgpipe", [
            Verdict("TG-1", "it is fast </script>", "holds", "2", "2.1"),
            Verdict("TG-2", "it is small", "does not hold", "1", "3", reason=TESTED),
            Verdict("TG-3", "it is old", "does not hold", "1", "3", reason=TESTED),
            Verdict("TG-4", "it is exact <!--<script>", "by tests"),
        ]),
        "madpipe": report("madpipe", [Verdict("MP-1", "plans are short", "not run")]),
    }  # fmt: skip
    titles = ("it, measured", "it, simulated", "</script>", "<!--<script>")
    chosen = [Chosen("traces-local", title, trace()) for title in titles]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(reports, {"rows": RACE}, chosen), encoding="utf-8")
    return path


def test_it_needs_nothing_from_anywhere(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text)
    assert not re.findall(r"https?://|@import|url\(", text)


def test_text_is_no_markup(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert "it is fast &lt;/script&gt;" in text and "<h2>Table 1: &lt;b&gt;</h2>" in text
    assert text.count("</script>") == text.count("<script") == 3 and "<!--" not in text.partition("<body")[2]


def test_names_of_tests_may_break_between_words(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert "&lt;see&gt; tests/<wbr>some/<wbr>test_<wbr>it.py::<wbr>test_<wbr>this_<wbr>and_<wbr>that</td>" in text


def test_a_reason_of_several_claims_is_shown_once(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert text.count("it is not, ") == 1 and text.count("<td>as for TG-2</td>") == 1


@chromium
@pytest.mark.parametrize("width", [500, 1280])
def test_no_verdict_overprints_its_neighbour(made: Path, width: int) -> None:
    script = """return {over: [...document.querySelectorAll("#claims td:nth-child(-n+2)")]
        .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.innerText)};"""
    found = browser.run(made, script, width=width)
    assert found["errors"] == [] and found["over"] == []


@chromium
def test_tables_keep_their_numbers_in_one_line_and_claims_their_columns(made: Path) -> None:
    """On a phone the tables are scrolled, each by itself."""
    found = browser.run(
        made,
        """
        const wide = (selector) => [...document.querySelectorAll(selector)].map((cell) => cell.offsetWidth);
        return {wraps: [...document.querySelectorAll("article td")].map((cell) => getComputedStyle(cell).whiteSpace),
                claims: wide("#claims th"), scrolled: document.querySelector(".table").scrollWidth};""",
        width=390,
    )
    assert found["errors"] == [] and set(found["wraps"]) == {"nowrap"}
    assert min(found["claims"]) > 45 and found["claims"][2] > 150 and found["scrolled"] > 390


@chromium
def test_on_paper_there_is_nothing_to_click(made: Path, tmp_path: Path) -> None:
    """The print's rules, as if they were the screen's."""
    printed = tmp_path / "printed.html"
    printed.write_text(made.read_text(encoding="utf-8").replace("@media print", "@media all"), encoding="utf-8")
    found = browser.run(
        printed,
        """
        const seen = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.offsetHeight).length;
        const size = (selector) => parseFloat(getComputedStyle(document.querySelector(selector)).fontSize);
        return {seen: seen("nav, form, button, .choices, .use"), note: size("article p"), table: size("article td"),
                scrolls: getComputedStyle(document.querySelector(".table")).overflowX};""",
    )
    assert found["errors"] == [] and (found["seen"], found["scrolls"]) == (0, "visible")
    assert found["note"] < 1.2 * found["table"]


def test_every_op_of_a_trace_is_there_with_its_times() -> None:
    (found,) = timeline_traces.data([Chosen("traces-local", "it", trace())])["traces"]
    boxes = [tuple(box) for lane in found["lanes"] for row in lane["rows"] for box in row]
    assert boxes == [
        ("F", "0", 0.0, 40.0, "0F0"), ("F", "0", 50.0, 90.0, "1F0"), ("step", "", 90.0, 100.0, "1step"),
        ("copy", "0", 40.0, 50.0, "1copy0<0"),
    ]  # fmt: skip
    assert [(lane["device"], lane["queue"]) for lane in found["lanes"]] == [
        (0, "compute"), (1, "compute"), (1, "copy in")
    ]  # fmt: skip
    assert found["length"] == pytest.approx(WINDOW_MS)


@chromium
def test_it_opens_without_an_error_and_shows_how_many_claims_hold(made: Path) -> None:
    found = browser.run(
        made,
        """
        return {cards: [...document.querySelectorAll(".cards li")].map((card) => card.innerText),
                wide: document.documentElement.scrollWidth,
                images: [...document.images].every((one) => one.naturalWidth > 0)};""",
    )
    assert found["errors"] == []
    assert found["cards"][0].split("\n") == ["2 of 4", "claims of torchgpipe hold (1 by tests)"]
    assert found["cards"][1].split("\n") == ["0 of 1", "claims of madpipe hold; 1 not run"]
    assert found["cards"][2].startswith("1.25 x") and "torchgpipe" in found["cards"][2]
    assert found["images"] and found["wide"] <= 1280


@chromium
def test_claims_are_filtered_by_paper_verdict_and_words(made: Path) -> None:
    found = browser.run(
        made,
        """
        const form = document.getElementById("filter");
        const shown = () => [...document.querySelectorAll("#claims tbody tr")].filter((row) => row.offsetHeight)
            .map((row) => row.cells[0].innerText);
        const set = (name, value) => { form.elements[name].value = value; form.dispatchEvent(new Event("input")); };
        const steps = [shown()];
        const values = [["paper", "torchgpipe"], ["verdict", "does not hold"], ["words", "FAST"], ["verdict", ""]];
        for (const [name, value] of values) { set(name, value); steps.push(shown()); }
        return {steps, count: form.querySelector("output").innerText};""",
    )
    assert found["errors"] == []
    ours = ["TG-1", "TG-2", "TG-3", "TG-4"]
    assert found["steps"] == [[*ours, "MP-1"], ours, ["TG-2", "TG-3"], [], ["TG-1"]]
    assert found["count"] == "1 of 5 claims"


POINT = """
    const canvas = document.querySelector("#timeline canvas"), tip = document.querySelector(".tip");
    canvas.scrollIntoView();
    const box = canvas.getBoundingClientRect();
    const look = () => [Number(canvas.dataset.start), Number(canvas.dataset.end)];
    const at = (ms) => 130 + (ms - look()[0]) / (look()[1] - look()[0]) * (box.width - 130);
    const fire = (kind, type, ms, y, more = {}) => canvas.dispatchEvent(new kind(type,
        {clientX: box.left + at(ms), clientY: box.top + y, bubbles: true, cancelable: true, ...more}));
"""


@chromium
def test_the_timeline_draws_what_is_chosen(made: Path) -> None:
    found = browser.run(
        made,
        POINT
        + """
        const pen = canvas.getContext("2d"), scale = devicePixelRatio;
        const pixel = (ms, y) => [...pen.getImageData(at(ms) * scale, y * scale, 1, 1).data];
        const pixels = () => [pixel(20, 60), pixel(70, 92), pixel(95, 92)];
        const before = {boxes: canvas.dataset.boxes, pixels: pixels(), high: box.height};
        document.querySelectorAll(".choices input")[1].click();
        return {before, after: canvas.dataset.boxes, high: canvas.getBoundingClientRect().height};""",
    )
    assert found["errors"] == []
    assert found["before"]["boxes"] == "8" and found["after"] == "4"
    assert found["high"] < found["before"]["high"]
    blue = [0x00, 0x72, 0xB2, 255]
    assert found["before"]["pixels"][:2] == [blue, blue] and found["before"]["pixels"][2] != blue


@chromium
def test_hovering_shows_the_op_its_device_and_its_times(made: Path) -> None:
    found = browser.run(
        made,
        POINT
        + """
        fire(PointerEvent, "pointermove", 20, 60);
        const text = tip.innerText, hidden = tip.hidden;
        fire(PointerEvent, "pointermove", 45, 60);
        return {text, hidden, between: tip.hidden};""",
    )
    assert found["errors"] == []
    assert " ".join(found["text"].split()) == "0F0 forward, device 0 compute, from 0.0 us for 40.00 ms"
    assert (found["hidden"], found["between"]) == (False, True)


@chromium
def test_the_wheel_zooms_where_it_points_and_dragging_pans(made: Path) -> None:
    found = browser.run(
        made,
        POINT
        + """
        const views = [look()];
        fire(WheelEvent, "wheel", 25, 60, {deltaY: -462});
        views.push(look());
        const x = at(30);
        fire(PointerEvent, "pointerdown", 30, 60);
        fire(PointerEvent, "pointermove", 20, 60);
        window.dispatchEvent(new PointerEvent("pointerup"));
        views.push(look());
        fire(MouseEvent, "dblclick", 20, 60);
        views.push(look());
        return {views};""",
    )
    assert found["errors"] == []
    whole, zoomed, panned, again = found["views"]
    assert whole == again == [0, pytest.approx(WINDOW_MS)]
    assert zoomed[1] - zoomed[0] == pytest.approx(50, rel=0.01)
    assert (25 - zoomed[0]) / (zoomed[1] - zoomed[0]) == pytest.approx(0.25, abs=0.005)
    assert panned == pytest.approx([zoomed[0] + 10, zoomed[1] + 10], abs=0.1)


@chromium
def test_the_keyboard_does_all_that_the_mouse_does(made: Path) -> None:
    found = browser.run(
        made,
        POINT
        + """
        canvas.focus();
        const press = (key) => {
            canvas.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
            return look();
        };
        const views = ["ArrowUp", "ArrowRight", "Home"].map(press);
        const ops = ["n", "n", "p"].map((key) => { press(key); return tip.innerText.split(" ")[0]; });
        return {views, ops, focused: document.activeElement === canvas};""",
    )
    assert found["errors"] == [] and found["focused"]
    assert found["views"][0] == pytest.approx([15, 85]) and found["views"][1] == pytest.approx([29, 99])
    assert found["views"][2] == pytest.approx([0, WINDOW_MS])
    assert found["ops"] == ["0F0", "1F0", "0F0"]


@chromium
def test_it_fits_a_phone(made: Path) -> None:
    found = browser.run(made, "return {wide: document.documentElement.scrollWidth, window: innerWidth};", width=390)
    assert found["errors"] == [] and found["wide"] <= found["window"]


@chromium
def test_light_and_dark_differ(made: Path, tmp_path: Path) -> None:
    grounds = []
    for dark in (False, True):
        browser.screenshot(made, tmp_path / f"{dark}.png", dark=dark)
        with Image.open(tmp_path / f"{dark}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20
            grounds.append(image.convert("L").getpixel((3, 3)))
    assert grounds[0] > 200 and grounds[1] < 60
