"""The page in a real browser: it renders, works by mouse and keys, and asks for nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import find_browser, how_to_get_one
from hangs import PATIENCE
from made_up_runs import write_run
from PIL import Image
from playwright.sync_api import Browser, Page, Request, Response

import tightrope as tr

SECTIONS = ("summary", "training", "certification", "tradeoff", "margins", "gallery", "settings")
EVIL = "<img src=x onerror=window.broken=1><script>window.broken=2<"


class Tab:
    """A page in a context of its own, and all that it logs and asks the network for."""

    def __init__(self, browser: Browser, page: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.context.set_default_timeout(1000 * PATIENCE)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.failures: list[str | None] = []
        self.answers = 0
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._ask)
        self.page.on("requestfailed", lambda request: self.failures.append(request.failure))
        self.page.on("response", self._answer)
        self.url = page.resolve().as_uri()
        self.page.goto(self.url)

    def _ask(self, request: Request) -> None:
        if request.url != self.url and not request.url.startswith("data:"):
            self.requests.append(request.url)

    def _answer(self, response: Response) -> None:
        self.answers += response.url != self.url and not response.url.startswith("data:")

    def settle(self) -> None:
        """Wait until the page has nothing to do, and has told all by then."""
        self.page.evaluate("new Promise(done => setTimeout(() => setTimeout(done)))")


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages; each must stay silent and ask for nothing to the end of its test."""
    tabs: list[Tab] = []

    def opened(page: Path, **options: Any) -> Page:
        tabs.append(Tab(browser, page, **options))
        return tabs[-1].page

    yield opened
    for tab in tabs:
        tab.settle()
        assert tab.problems == []
        assert tab.requests == []
        tab.context.close()


@pytest.fixture(scope="module")
def single(real_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tr.report(real_run, out=tmp_path_factory.mktemp("single") / "report.html").page


@pytest.fixture(scope="module")
def several(real_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of three runs; the second is not certified."""
    folder = tmp_path_factory.mktemp("several")
    runs = [
        write_run(folder / "beta", eps="0.1"),
        write_run(folder / "gamma", eps="0.3", certified=False),
        write_run(folder / "alpha", eps="0.2"),
    ]
    return tr.report([*runs, real_run], out=folder / "report.html").page


@pytest.mark.parametrize(
    ("program", "command"),
    [("apt-get", "sudo apt-get install -y chromium"), ("brew", "brew install --cask chromium")],
)
def test_where_there_is_no_browser_one_command_helps(
    monkeypatch: pytest.MonkeyPatch, program: str, command: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name if name == program else None)
    assert find_browser() is None and how_to_get_one() == command


def test_every_section_is_rendered(open_page: Open, single: Path) -> None:
    page = open_page(single)
    heights = page.evaluate(
        "[...document.querySelectorAll('main > section')].map(s => [s.id, s.offsetHeight])"
    )
    assert [name for name, _ in heights] == list(SECTIONS)
    assert all(height > 100 for _, height in heights), heights
    drawn = page.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(drawn) == 5 and min(drawn) > 100
    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert page.evaluate("document.images.length") >= 24 and page.evaluate(broken) == 0
    colors = (
        "[...new Set([...document.querySelectorAll('.fill')].map(e => getComputedStyle(e).fill))]"
    )
    fills = page.evaluate(colors)
    assert any("pattern-falsified" in fill for fill in fills) and len(fills) >= 2
    assert page.evaluate("document.querySelector('.card.certified .card-value').textContent") != "–"


@pytest.mark.parametrize(("width", "mobile"), [(360, True), (1280, False)])
def test_every_width(
    open_page: Open, several: Path, tmp_path: Path, width: int, mobile: bool
) -> None:
    page = open_page(several, is_mobile=mobile)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    with Image.open(tmp_path / "page.png") as image:
        assert image.width == width and image.height > 2000
        pixels = np.asarray(image.convert("L"), dtype=np.float64)
    assert pixels.std() > 10
    # Every part of the page has something on it.
    for part in np.array_split(pixels, 8):
        assert part.std() > 2


def names(page: Page) -> list[str]:
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('.sortable tbody th')].map(c => c.textContent)"
    )
    return found


def sorting(page: Page) -> dict[str, str]:
    found = page.evaluate(
        "[...document.querySelectorAll('.sortable thead th')]"
        ".map(h => [h.querySelector('button').firstChild.textContent, h.ariaSort])"
    )
    return {name: order for name, order in found if order != "none"}


def header(name: str) -> str:
    columns = (
        *("#", "Run", "Method", "Net", "ε", "Samples", "Natural", "Adversarial", "Certified"),
        *("Unknown", "Training", "Certifying"),
    )
    return f".sortable thead th:nth-child({columns.index(name) + 1}) button"


def test_sorting_by_click(open_page: Open, several: Path) -> None:
    """Gamma is not certified and stays in the table of those, whatever the other is sorted by."""
    page = open_page(several)
    assert names(page) == ["beta", "alpha", "run", "gamma"]
    assert sorting(page) == {"#": "ascending"}
    page.click(header("Run"))
    assert names(page) == ["alpha", "beta", "run", "gamma"] and sorting(page) == {
        "#": "ascending",
        "Run": "ascending",
    }
    page.click(header("Run"))
    assert names(page) == ["run", "beta", "alpha", "gamma"] and sorting(page) == {
        "#": "ascending",
        "Run": "descending",
    }
    # Numbers begin with the largest.
    for last in range(2):
        page.click(header("Certified"))
        assert names(page)[-1] == "gamma", last
        values = page.evaluate(
            "[...document.querySelectorAll('.sortable tbody tr')]"
            ".map(r => r.cells[8].dataset.value).filter(v => v).map(Number)"
        )
        assert values == sorted(values, reverse=last == 0) and len(values) == 3
    page.click(header("ε"))
    assert names(page)[2:] == ["run", "gamma"]  # certified at 8/255, the others at 0.1


def test_sorting_by_keys(open_page: Open, several: Path) -> None:
    page = open_page(several)
    page.evaluate(f"document.querySelector({json.dumps(header('#'))}).focus()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.firstChild.textContent") == "Run"
    ring = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(ring) == "solid"
    page.keyboard.press("Enter")
    assert names(page) == ["alpha", "beta", "run", "gamma"]
    page.keyboard.press("Space")
    assert names(page) == ["run", "beta", "alpha", "gamma"]
    assert page.evaluate("document.activeElement.firstChild.textContent") == "Run"


def test_the_first_tab_stop_skips_to_the_content(open_page: Open, single: Path) -> None:
    page = open_page(single)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LINE = "getComputedStyle(document.querySelector('.line.natural')).stroke"


def brightness(color: str) -> float:
    return sum(map(int, color[4:-1].split(",")[:3])) / 3


def test_dark_and_light(open_page: Open, single: Path) -> None:
    page = open_page(single)
    button = "document.querySelector('button.theme')"
    assert brightness(page.evaluate(BACKGROUND)) > 200 > 100 > brightness(page.evaluate(LINE))
    assert page.evaluate(f"{button}.ariaPressed") == "false"
    page.click("button.theme")
    assert brightness(page.evaluate(BACKGROUND)) < 60 and brightness(page.evaluate(LINE)) > 200
    assert page.evaluate(f"{button}.ariaPressed") == "true"
    page.click("button.theme")
    assert brightness(page.evaluate(BACKGROUND)) > 200


def test_the_theme_of_the_system(open_page: Open, single: Path, tmp_path: Path) -> None:
    page = open_page(single, color_scheme="dark")
    assert brightness(page.evaluate(BACKGROUND)) < 60
    page.click("button.theme")
    assert brightness(page.evaluate(BACKGROUND)) > 200
    page.screenshot(path=tmp_path / "light.png")
    with Image.open(tmp_path / "light.png") as image:
        assert np.asarray(image.convert("L")).mean() > 150


def test_reading_off_a_chart(open_page: Open, single: Path) -> None:
    page = open_page(single)
    reading = """(() => {
        const figure = document.querySelector("figure:has(svg.curves)");
        return [figure.querySelector(".epoch").textContent,
                ...[...figure.querySelectorAll(".value")].map(v => v.textContent)];
    })()"""
    assert page.evaluate(reading)[0] == ""
    page.hover("svg.curves")
    at_pointer = page.evaluate(reading)
    assert at_pointer[0] in ("epoch 2", "epoch 3") and all("%" in v for v in at_pointer[1:])
    page.evaluate("document.querySelector('svg.curves').focus()")
    page.keyboard.press("Home")
    assert page.evaluate(reading)[0] == "epoch 1"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(reading)[0] == "epoch 2"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(reading)[0] == "epoch 1"
    page.evaluate("document.activeElement.blur()")
    assert page.evaluate(reading)[0] == ""


def test_copying_a_command(open_page: Open, single: Path) -> None:
    page = open_page(single)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.bring_to_front()
    page.evaluate("""
        const button = document.querySelector('button.copy');
        window.told = new Promise(tell => {
            new MutationObserver(() => tell(button.textContent)).observe(button, {childList: true});
        });
        undefined;
    """)
    page.click("button.copy")
    assert page.evaluate("window.told") == "Copied"
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("tightrope train --out")


def test_printing(open_page: Open, several: Path) -> None:
    page = open_page(several, color_scheme="dark")
    opened = "document.querySelectorAll('details[open]').length"
    assert page.evaluate(opened) == 2
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(opened) == 8
    page.emulate_media(media="print")
    assert page.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(opened) == 2
    assert len(page.pdf()) > 10_000


def test_markup_in_names_is_shown_as_text(open_page: Open, tmp_path: Path) -> None:
    """A run, its classes and its files with names that are HTML."""
    images = tmp_path / "images"
    generator = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in (EVIL, "plain"):
            (images / part / name).mkdir(parents=True)
            for i in range(8):
                pixels = generator.integers(0, 256, (6, 6), dtype=np.uint8)
                Image.fromarray(pixels).save(images / part / name / f"{i}.png")
    run = tr.train(
        out=tmp_path / EVIL,
        data=str(images),
        net="mlp",
        width=4,
        depth=1,
        batch_norm=False,
        epochs=1,
        annealing_epochs=0,
        batch_size=4,
        select="last",
        validation=0,
        device="cpu",
    )
    tr.certify(run, eps=0.2, steps=5, restarts=1, stages=("ibp", "attack"))
    page = open_page(tr.report(run).page)
    assert page.evaluate("document.querySelector('h1').textContent") == EVIL
    assert EVIL in page.evaluate("document.querySelector('#gallery').textContent")
    assert EVIL in page.evaluate("document.querySelector('code').textContent")
    assert page.evaluate("window.broken === undefined")
    assert page.evaluate("document.querySelectorAll('main script:not([type])').length") == 0


def test_the_policy_stops_what_would_slip_through(
    browser: Browser, single: Path, tmp_path: Path
) -> None:
    """Even if text became markup one day, the browser would not run or load it."""
    attacked = tmp_path / "attacked.html"
    html = single.read_text(encoding="utf-8")
    attack = "<script>window.broken=1</script><img src='http://localhost:9/x.png'>"
    assert "</main>" in html
    attacked.write_text(html.replace("</main>", f"{attack}</main>"), encoding="utf-8")
    tab = Tab(browser, attacked)
    tab.settle()
    assert sum("Content Security Policy" in problem for problem in tab.problems) == 2, tab.problems
    assert tab.page.evaluate("window.broken === undefined")
    assert tab.failures == ["csp"] and tab.answers == 0
    tab.context.close()


def test_a_page_moved_elsewhere_still_works(open_page: Open, single: Path, tmp_path: Path) -> None:
    moved = tmp_path / "far away" / "p%20q.html"
    moved.parent.mkdir()
    shutil.copy(single, moved)
    page = open_page(moved)
    assert page.evaluate("document.querySelectorAll('main > section').length") == len(SECTIONS)
