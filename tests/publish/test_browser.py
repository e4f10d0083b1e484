"""The page in headless Chromium: drawn, sorted, filtered, switched, and inert when names and code are hostile."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from peerlane.publish.gather import gather
from peerlane.publish.page import write_page
from sample_results import ENVIRONMENT, VIRTUAL, text_of
from sample_runs import CODE, make_run, reference_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SUITE = range(1, 88)
HOSTILE = "</script><img src=x onerror='window.hacked=1'>"
LOAD_S = 2.0
SVG = "{http://www.w3.org/2000/svg}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: there is no chromium; install it, for example by `apt-get install chromium`"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """A page that was opened from a file, what it complained of, and what it asked for."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        started = time.monotonic()
        self.page.goto(file.as_uri())
        self.load_s = time.monotonic() - started

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def column(self, number: int) -> list[str]:
        """The cells of a column of the visible rows of the table of candidates on the first board."""
        script = "n => [...document.querySelectorAll('#board-0 table.candidates tbody tr:not([hidden])')].map(r => r.cells[n].textContent)"
        return list(self.page.evaluate(script, number))


@pytest.fixture(scope="module")
def suite_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """87 candidates."""
    folder = tmp_path_factory.mktemp("suite")
    make_run(folder / "run", "model-a", SUITE)
    write_page(gather([folder]), folder / "page.html", "One model")
    return folder / "page.html"


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,044 candidates of four authors, their references, and a virtual node."""
    folder = tmp_path_factory.mktemp("large")
    for number, good in enumerate((0.7, 0.5, 0.3, 0.8)):
        make_run(folder / str(number), f"model-{number}", SUITE, 3, good=good, kind="agent" if number == 3 else "generate")
    make_run(folder / "virtual", "model-0", range(1, 9), environment=VIRTUAL)
    (folder / "references.jsonl").write_text(text_of(*reference_results(SUITE)))
    write_page(gather([folder]), folder / "page.html", "Four authors")
    return folder / "page.html"


@pytest.fixture(scope="module")
def mixed_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authors with long names, one of which has no break; a virtual node; references alone on a third machine."""
    folder = tmp_path_factory.mktemp("mixed")
    make_run(folder / "a", "a" * 60, range(1, 9), 3)
    make_run(folder / "b", "an author of several words " * 3, range(1, 9), kind="agent")
    make_run(folder / "virtual", "m", range(1, 4), environment=VIRTUAL)
    two = {**ENVIRONMENT, "gpus": [{"name": "NVIDIA H200"}] * 2}
    (folder / "references.jsonl").write_text(text_of(*reference_results(range(1, 9), environment=two, world_size=2)))
    write_page(gather([folder]), folder / "page.html", "A title of several words, for a phone too")
    return folder / "page.html"


@pytest.mark.long  # loads are timed: beside other tests they take longer
@pytest.mark.parametrize("size", ["suite_page", "large_page"])
def test_it_loads_fast_and_draws_its_plots(browser: Any, size: str, request: pytest.FixtureRequest) -> None:
    opened = [Opened(browser, request.getfixturevalue(size)) for _ in range(3)]
    assert min(item.load_s for item in opened) < LOAD_S
    drawn = opened[0]
    for plot in ("speeds", "sizes", "fast", "verdicts", "reached", "mechanisms"):
        assert drawn.count(f"#board-0 figure[data-plot={plot}] svg :is(path, rect, circle)") > 10, plot
    assert drawn.complaints == [] and len(drawn.requests) == 1
    for item in opened:
        item.page.close()


def test_tables_sort_and_filter_by_mouse_and_keyboard(browser: Any, large_page: Path) -> None:
    opened = Opened(browser, large_page)
    page = opened.page
    page.locator("#board-0 table.candidates th button", has_text="speedup, graph").click()
    speedups = [float(cell.split("[")[0]) for cell in opened.column(6) if cell != "–"]
    assert len(speedups) > 400 and speedups == sorted(speedups, reverse=True)
    page.locator("#board-0 table.candidates th button", has_text="problem").press("Enter")
    assert opened.column(0)[0] == "87"
    page.locator("#board-0 input[type=search]").fill("MODEL-1 gemm")
    rows = list(zip(opened.column(1), opened.column(3), strict=True))
    assert rows and all("gemm" in slug and author == "model-1" for slug, author in rows)
    assert page.locator("#board-0 output").text_content() == f"{len(rows)} of {4 * 3 * 87 + 87}"
    page.locator("#board-0 input[type=search]").fill("")
    page.locator("#board-0 .filters select").select_option("hang")
    assert set(opened.column(4)) == {"hang"}
    page.close()


def test_boards_authors_modes_and_themes_switch(browser: Any, large_page: Path) -> None:
    opened = Opened(browser, large_page)
    page = opened.page
    curves = "#board-0 figure[data-plot=fast] g[aria-label=line] path"
    assert opened.count(curves) == 4 * 2
    page.locator("#board-0 .chips button", has_text="model-2").click()
    assert opened.count(curves) == 3 * 2
    page.locator("#board-0 [data-choice=mode]").select_option("graph")
    assert opened.count(curves) == 3
    hidden = page.locator("#board-0 th.m-eager")
    assert hidden.count() > 4 and not any(hidden.nth(index).is_visible() for index in range(hidden.count()))
    page.locator("#board-0 [data-choice=author]").select_option(label="model-1")
    assert opened.count(curves) == 1 and set(opened.column(3)) == {"model-1"}
    page.locator("#board-0 [data-choice=author]").select_option("")
    page.locator("#board-0 .chips button", has_text="model-2").click()
    for name in ("model-0", "model-1", "model-3"):
        page.locator("#board-0 .chips button", has_text=name).click()
    assert opened.count(curves) == 1, "one author stays"
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.locator("#theme").click()
    assert page.evaluate(colour) != light
    page.locator("#machines").select_option("1")
    assert page.url.endswith("#board-1") and page.locator("#boards option:not([hidden])").count() == 1
    assert page.locator("#board-1 .notice").first.is_visible() and not page.locator("#board-0").is_visible()
    assert opened.count("#board-1 figure[data-plot=fast] svg") == 1 and opened.complaints == []
    page.close()


WIDER = """() => [...document.querySelectorAll('header, main, .card, figure > svg, .tiles li, select, label, p, .chips button')]
    .filter((e) => e.getClientRects().length && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_no_board_is_wider_than_the_window(browser: Any, mixed_page: Path, width: int, scheme: str) -> None:
    opened = Opened(browser, mixed_page, width, scheme)
    page = opened.page
    assert opened.count("#boards option") == 3
    for place in ("board-0", "board-1", "board-2", "c0"):
        page.evaluate("place => { location.hash = place }", place)
        page.wait_for_selector(f"#{place}")
        assert page.evaluate(WIDER) == [] and page.evaluate("document.documentElement.scrollWidth") == width
    assert opened.complaints == []
    page.close()


def test_a_figure_becomes_a_file_of_its_own(browser: Any, mixed_page: Path, tmp_path: Path) -> None:
    opened = Opened(browser, mixed_page, 1400, "dark")
    page = opened.page
    card = page.locator("#board-0 .plot", has=page.locator("figure[data-plot=sizes]"))
    with page.expect_download() as saved:
        card.locator("[data-save=svg]").click()
    assert saved.value.suggested_filename == "share-of-the-bound-against-message-size-pkb-4-ranks-open-track-timing-protocol-1.svg"
    svg = ElementTree.parse(saved.value.path())
    texts = [element.text for element in svg.iter(f"{SVG}text")]
    assert (
        texts[0] == "Share of the bound against message size: pkb, 4 ranks, open track, timing protocol 1"
        and "a" * 60 in texts
        and "reference" in texts
    )
    assert len(list(svg.iter(f"{SVG}circle"))) > 10 and not list(svg.iter(f"{SVG}a")), "a link would lead nowhere from a file"
    width, height = (int(svg.getroot().get(name, "")) for name in ("width", "height"))
    page.evaluate("window.print = () => {}")
    card.locator("[data-save=pdf]").click()
    pdf = page.pdf(prefer_css_page_size=True)
    (box,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    assert [round(float(side)) for side in box] == pytest.approx([0.75 * width, 0.75 * height], abs=2), "one page, in points"
    assert b"/Font" in pdf and b"/Subtype /Image" not in pdf and opened.complaints == []
    page.close()


def test_candidates_open_with_code_and_block_times(browser: Any, suite_page: Path, large_page: Path) -> None:
    opened = Opened(browser, suite_page)
    page = opened.page
    row = page.locator("#board-0 table.candidates tr[data-verdict=correct] a").first
    row.press("Enter")
    panel = page.locator("article.candidate:target")
    assert panel.is_visible() and "def solution" in panel.locator("pre.code").text_content()
    assert panel.locator("svg.blocks circle.clock").count() == 2 * 2 * 9
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    page.close()
    page = Opened(browser, large_page).page
    page.locator("#board-0 table.candidates tr[data-verdict=correct] a").first.click()
    page.wait_for_url("**/page_candidates/c*.html")
    assert "def solution" in page.locator("pre.code").text_content() and page.locator("svg.blocks").count() == 2
    page.get_by_text("all results").click()
    page.wait_for_url("**/page.html#candidates")
    page.close()


def test_hostile_names_and_code_do_nothing(browser: Any, tmp_path: Path) -> None:
    code = f'NAME = """{HOSTILE}"""\n' + CODE
    make_run(tmp_path / "run", HOSTILE, range(1, 9), code=code, name=HOSTILE)
    (tmp_path / "results.jsonl").write_text(text_of(*reference_results((1, 2))))
    write_page(gather([tmp_path / "run"]), tmp_path / "page.html", HOSTILE)
    opened = Opened(browser, tmp_path / "page.html")
    opened.page.locator("#board-0 table.candidates a").first.click()
    assert opened.page.locator("h1").text_content() == HOSTILE
    assert opened.page.evaluate("window.hacked") is None and opened.requests == [(tmp_path / "page.html").as_uri()]
    assert opened.count("#board-0 figure svg") >= 3 and opened.complaints == []
    opened.page.close()


def test_the_policy_stops_what_escaping_would_miss(browser: Any, suite_page: Path, tmp_path: Path) -> None:
    """Markup that a hole in the escaping would let through does nothing in the page, and something without its policy."""
    html = suite_page.read_text().replace("</main>", f"<script>window.hacked=1</script>{HOSTILE.removeprefix('</script>')}</main>")
    for name, text, hacked in (("with", html, None), ("without", html.replace("Content-Security-Policy", "nothing"), 1)):
        (tmp_path / f"{name}.html").write_text(text)
        opened = Opened(browser, tmp_path / f"{name}.html")
        assert opened.page.evaluate("window.hacked") == hacked, name
        assert opened.count("#board-0 figure[data-plot=fast] svg") == 1
        opened.page.close()
