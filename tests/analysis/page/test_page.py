"""The report page, looked at in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis.bench import race_plot
from analysis.cells import Cell, Judged
from analysis.claim_check import Verdict
from analysis.page import timeline_traces
from analysis.page.build import Content, page
from analysis.page.papers import paper
from analysis.paper_pages import PAGES, Report
from analysis.plots import style
from analysis.report import Section
from analysis.torchgpipe.traces import Chosen
from harness.core.trace import Span, Trace
from tests.analysis.page import browser

WINDOW_MS = 100.0
TESTED = "it is not, <see> tests/some/test_it.py::test_this_and_that"
HERE = "tests/analysis/page/test_page.py"
LONG = "a long figure, of many words and of more than one number; " * 12
RACE = [
    {"model": "A", "entry": "single", "step": 2.0, "quartiles": [1.9, 2.1], "speed / single": 1.0},
    {"model": "A", "entry": "gpipe", "step": 1.0, "quartiles": [0.9, 1.1], "speed / single": 2.0},
    {"model": "A", "entry": "torchgpipe", "step": 1.25, "quartiles": [1.2, 1.3], "speed / single": 1.6},
]
PREDICTION = [
    {"entry": "1 micro-batches, never", "step": 0.5, "quartiles": [0.4, 0.6], "predicted": 0.45,
     "predicted / measured": 0.9, "memory, device 0": 1.0, "memory, device 1": 0.95},
    {"error of time": 0.1},
]  # fmt: skip
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
            Verdict("TG-1", "it is fast </script>", "holds", "2", LONG, LONG),
            Verdict("TG-2", "it is small", "does not hold", "1", "3", reason=TESTED),
            Verdict("TG-3", "it is old", "does not hold", "1", "3", reason=TESTED),
            Verdict("TG-4", "it is exact <!--<script>", "by tests", reason=f"exact in {HERE}::made and {HERE}"),
        ]),
        "madpipe": report("madpipe", [Verdict("MP-1", "plans are short", "not run")]),
    }  # fmt: skip
    titles = ("it, measured", "it, simulated", "</script>", "<!--<script>")
    chosen = [Chosen("traces-local", title, trace()) for title in titles]
    path = tmp_path_factory.mktemp("page") / "report.html"
    bench = {"race": {"rows": RACE}, "prediction": {"rows": PREDICTION}}
    ours = [Judged(Cell("Table <1>", "time, s", row, 2.0, own), "", "late.") for row, own in (("a", 2.0), ("b", 5.0))]
    cells = {"torchgpipe": [*ours, Judged(Cell("Table <1>", "time, s", "c", 2.0, None), "", "")], "madpipe": []}
    path.write_text(page(Content(reports, bench, [], chosen, cells), path.parent), encoding="utf-8")
    return path


def test_it_needs_nothing_from_anywhere(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    links = re.findall(r"""<a href=["']([^"'#]+)""", text)
    assert not re.findall(r"""(?<!<a )(?:src|href)=["'](?!data:|#)""", text)
    assert links and all((made.parent / link).is_file() for link in links)
    assert not re.findall(r"https?://|@import|url\(", text)


def test_text_is_no_markup(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert "it is fast &lt;/script&gt;" in text and "<summary>Table 1: &lt;b&gt;</summary>" in text
    assert text.count("</script>") == text.count("<script") == 3 and "<!--" not in text.partition("<body")[2]


def test_names_of_tests_may_break_between_words(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert "&lt;see&gt; tests/<wbr>some/<wbr>test_<wbr>it.py::<wbr>test_<wbr>this_<wbr>and_<wbr>that</dd>" in text


def test_published_figures_are_next_to_predicted_ones(made: Path) -> None:
    text = made.read_text(encoding="utf-8").partition('<section id="published">')[2].partition("</section>")[0]
    assert "<strong>1 of 2</strong> cells within a factor 1.1" in text and 'id="published-ratios"' in text
    assert "<td>Table &lt;1&gt;</td>" in text and "<p>1: late.</p>" in text
    assert "<summary>torchgpipe: 3 cells</summary>" in text and "madpipe: It prints no absolute figure" in text


def test_a_reason_of_several_claims_is_shown_once(made: Path) -> None:
    text = made.read_text(encoding="utf-8")
    assert text.count("it is not, ") == 1 and text.count("<dd>as for TG-2</dd>") == 1


@pytest.mark.usefixtures("browser")
@chromium
@pytest.mark.parametrize("width", [500, 1280])
def test_no_verdict_overprints_its_neighbour(made: Path, width: int) -> None:
    script = """return {over: [...document.querySelectorAll(".claim .id, .claim .says")]
        .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.innerText)};"""
    found = browser.run(made, script, width=width)
    assert found["errors"] == [] and found["over"] == []


@pytest.mark.usefixtures("browser")
@chromium
@pytest.mark.parametrize("width", [390, 800])
def test_tables_keep_their_numbers_in_one_line_and_claims_their_columns(made: Path, width: int) -> None:
    """Tables are scrolled, each by itself; claims have no need to."""
    found = browser.run(
        made,
        """
        document.querySelectorAll("details").forEach((one) => { one.open = true; });
        const wide = (selector) => [...document.querySelectorAll(selector)].map((cell) => cell.offsetWidth);
        const over = (one) => one.scrollWidth > one.clientWidth, tables = [...document.querySelectorAll(".table")];
        return {wraps: [...document.querySelectorAll("article td")].map((cell) => getComputedStyle(cell).whiteSpace),
                ids: wide(".claim .id"), cuts: wide(".claim .cut"), dds: wide(".claim dd"),
                scrolled: tables.some(over), page: over(document.documentElement)};""",
        width=width,
    )
    assert found["errors"] == [] and set(found["wraps"]) == {"nowrap"}
    assert min(found["ids"]) > 45 and min(found["cuts"]) > 150 and min(found["dds"]) > 150
    assert found["scrolled"] and not found["page"]


@pytest.mark.usefixtures("browser")
@chromium
def test_people_see_the_race_first_then_figures_then_claims(made: Path) -> None:
    found = browser.run(
        made,
        """
        const top = (one) => one.getBoundingClientRect().top;
        const sections = [...document.querySelectorAll("main > section")].sort((a, b) => top(a) - top(b));
        const links = [...document.querySelectorAll("nav a")].map((one) => one.getAttribute("href").slice(1));
        return {order: sections.map((one) => one.id), links};""",
    )
    order = ["the-race", "predictions", "published", "torchgpipe", "madpipe", "claims", "traces-of-runs"]
    assert found["errors"] == [] and found["order"] == found["links"] == order


def test_what_is_not_there_has_no_place(made: Path) -> None:
    text = page(Content({}, {}, [], []), made.parent)
    assert not re.findall(
        r"the-race|predictions|published|None|Undefined", text.partition("<body>")[2].partition("<script>")[0]
    )


@pytest.mark.usefixtures("browser")
@chromium
def test_a_closed_claim_has_at_most_four_lines(made: Path) -> None:
    """Also the one with a long figure, which is there once it is open."""
    found = browser.run(
        made,
        """
        const lines = () => [...document.querySelectorAll(".claim")].map((one) =>
            one.getBoundingClientRect().height / parseFloat(getComputedStyle(one.querySelector("summary")).lineHeight));
        const closed = lines();
        document.querySelectorAll(".claim").forEach((one) => { one.open = true; });
        const cut = [...document.querySelectorAll(".cut")].filter((one) => one.scrollHeight > one.clientHeight + 1);
        return {closed, open: lines(), cut: cut.length};""",
    )
    assert found["errors"] == [] and len(found["closed"]) == 5
    assert max(found["closed"]) <= 4 < found["open"][0] and found["cut"] == 0


@pytest.mark.usefixtures("browser")
@chromium
def test_details_open_by_keyboard_and_without_a_script(made: Path) -> None:
    """Each key pressed for real: Tab until the claim has the focus, then Enter and Space."""
    text = re.sub(r"<script.*?</script>", "", made.read_text(encoding="utf-8"), flags=re.DOTALL)
    bare = made.with_name("bare.html")
    bare.write_text(text, encoding="utf-8")
    inside = "document.activeElement.parentElement.id"
    open_ = f'[{inside}, document.querySelector("#TG-2 dl").checkVisibility()]'
    focusable = re.findall(r"<a |<summary|<select|<input ", text[: text.index('id="TG-2"')])
    tabs = "\t" * (len(focusable) + 1)
    steps = [browser.press(bare, tabs + keys, open_) for keys in ("", "\r", " ", "\r\r")]
    assert steps == [["TG-2", False], ["TG-2", True], ["TG-2", True], ["TG-2", False]]


@pytest.mark.usefixtures("browser")
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


def test_boxes_of_traces_do_not_repeat_what_is_equal() -> None:
    words = ("engine=gpipe model=unet checkpoint=never planner=balance", "engine=myelin model=unet planner=balance")
    titles = [f"{one}, {source}" for one in words for source in ("measured", "simulated")]
    chosen = [Chosen("traces-local", title, trace()) for title in titles]
    local, other = timeline_traces.groups([*chosen, Chosen("torchgpipe_table1-paper", "baseline, simulated", trace())])
    assert local.common == "unet, planner=balance"
    assert [run.label for run in local.runs] == ["gpipe, checkpoint=never", "myelin"]
    boxes = [[(one.number, one.label, one.chosen) for one in run.choices] for run in (*local.runs, *other.runs)]
    assert boxes == [[(0, "measured", True), (1, "simulated", True)], [(2, "measured", False), (3, "simulated", False)],
                     [(4, "simulated", False)]]  # fmt: skip
    assert (other.common, other.runs[0].label) == ("", "baseline")


def test_a_caption_repeats_no_title() -> None:
    def titled(results: object) -> Figure:
        drawn = style.panels(1, 1, 2, 1)[0]
        drawn.suptitle("torchgpipe, Table 1: it")
        return drawn

    made_of = report("torchgpipe", [])
    figures = {"torchgpipe_table1": titled, "torchgpipe_fig7": lambda results: style.panels(1, 2, 2, 1)[0]}
    found = paper("torchgpipe", replace(made_of, page=replace(made_of.page, figures=figures)))
    assert [(one.alt, one.caption) for one in found.figures] == [("torchgpipe, Table 1: it", ""), ("Fig. 7", "Fig. 7")]


@pytest.mark.usefixtures("browser")
@chromium
def test_it_opens_without_an_error_and_shows_how_many_claims_hold(made: Path) -> None:
    found = browser.run(
        made,
        """
        const cards = [...document.querySelectorAll("#the-race .cards li, #claims .cards li")];
        return {cards: cards.map((card) => card.innerText),
                wide: document.documentElement.scrollWidth,
                images: [...document.images].every((one) => one.naturalWidth > 0)};""",
    )
    assert found["errors"] == []
    assert found["cards"][0].startswith("1.25 x") and "torchgpipe" in found["cards"][0]
    assert found["cards"][1].startswith("10.0 %")
    assert found["cards"][2].split("\n") == ["2 of 4", "claims of torchgpipe hold (1 by tests)"]
    assert found["cards"][3].split("\n") == ["0 of 1", "claims of madpipe hold; 1 not run"]
    assert found["images"] and found["wide"] <= 1280


@pytest.mark.usefixtures("browser")
@chromium
def test_claims_are_filtered_by_paper_verdict_and_words(made: Path) -> None:
    found = browser.run(
        made,
        """
        const form = document.getElementById("filter");
        const shown = () => [...document.querySelectorAll(".claim")].filter((row) => row.offsetHeight)
            .map((row) => row.querySelector(".id").innerText);
        const set = (name, value) => { form.elements[name].value = value; form.dispatchEvent(new Event("input")); };
        const steps = [shown()];
        const values = [["paper", "torchgpipe"], ["verdict", "does not hold"], ["words", "FAST"], ["verdict", ""],
                        ["words", "<SEE>"], ["paper", "madpipe"], ["words", ""]];
        for (const [name, value] of values) { set(name, value); steps.push(shown()); }
        const heads = [...document.querySelectorAll(".claims h3")].filter((one) => one.offsetHeight)
            .map((one) => one.innerText);
        return {steps, heads, count: form.querySelector("output").innerText};""",
    )
    assert found["errors"] == []
    ours = ["TG-1", "TG-2", "TG-3", "TG-4"]
    in_details = ["TG-2"]
    assert found["steps"] == [[*ours, "MP-1"], ours, ["TG-2", "TG-3"], [], ["TG-1"], in_details, [], ["MP-1"]]
    assert found["heads"] == ["madpipe"]
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


@pytest.mark.usefixtures("browser")
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


@pytest.mark.usefixtures("browser")
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


@pytest.mark.usefixtures("browser")
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


@pytest.mark.usefixtures("browser")
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


@pytest.mark.usefixtures("browser")
@chromium
def test_it_fits_a_phone(made: Path) -> None:
    found = browser.run(made, "return {wide: document.documentElement.scrollWidth, window: innerWidth};", width=390)
    assert found["errors"] == [] and found["wide"] <= found["window"]


@pytest.mark.usefixtures("browser")
@chromium
def test_light_and_dark_differ(made: Path, tmp_path: Path) -> None:
    grounds = []
    for dark in (False, True):
        browser.screenshot(made, tmp_path / f"{dark}.png", dark=dark)
        with Image.open(tmp_path / f"{dark}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20
            grounds.append(image.convert("L").getpixel((3, 3)))
    assert grounds[0] > 200 and grounds[1] < 60
