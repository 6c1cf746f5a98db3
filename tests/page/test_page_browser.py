"""The page in a real browser: it renders, works by mouse and keys, and asks for nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, Tab, find_browser, how_to_get_one
from made_up_runs import write_run
from PIL import Image

import tightrope as tr

SECTIONS = ("summary", "training", "certification", "tradeoff", "margins", "gallery", "settings")
EVIL = "<img src=x onerror=window.broken=1><script>window.broken=2<"

Open = Callable[..., Tab]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages; each must stay silent and ask for nothing to the end of its test."""
    tabs: list[Tab] = []

    def opened(page: Path, **options: Any) -> Tab:
        tabs.append(Tab(browser, page, **options))
        return tabs[-1]

    yield opened
    for tab in tabs:
        tab.settle()
        assert tab.problems() == []
        assert tab.requests() == []
        tab.close()


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
    tab = open_page(single)
    heights = tab.run(
        "[...document.querySelectorAll('main > section')].map(s => [s.id, s.offsetHeight])"
    )
    assert [name for name, _ in heights] == list(SECTIONS)
    assert all(height > 100 for _, height in heights), heights
    drawn = tab.run(
        "[...document.querySelectorAll('svg.chart')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(drawn) == 5 and min(drawn) > 100
    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert tab.run("document.images.length") >= 24 and tab.run(broken) == 0
    colors = (
        "[...new Set([...document.querySelectorAll('.fill')].map(e => getComputedStyle(e).fill))]"
    )
    fills = tab.run(colors)
    assert any("pattern-falsified" in fill for fill in fills) and len(fills) >= 2
    assert tab.run("document.querySelector('.card.certified .card-value').textContent") != "–"


@pytest.mark.parametrize(("width", "mobile"), [(360, True), (1280, False)])
def test_every_width(
    open_page: Open, several: Path, tmp_path: Path, width: int, mobile: bool
) -> None:
    tab = open_page(several, width=width, height=900, mobile=mobile)
    assert tab.run("document.documentElement.scrollWidth") <= width
    with Image.open(tab.screenshot(tmp_path / f"{width}.png", whole=True)) as image:
        assert image.width == width and image.height > 2000
        pixels = np.asarray(image.convert("L"), dtype=np.float64)
    assert pixels.std() > 10
    # Every part of the page has something on it.
    for part in np.array_split(pixels, 8):
        assert part.std() > 2


def names(tab: Tab) -> list[str]:
    found: list[str] = tab.run(
        "[...document.querySelectorAll('.sortable tbody th')].map(c => c.textContent)"
    )
    return found


def sorting(tab: Tab) -> dict[str, str]:
    found = tab.run(
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
    tab = open_page(several)
    assert names(tab) == ["beta", "gamma", "alpha", "run"] and sorting(tab) == {"#": "ascending"}
    tab.click(header("Run"))
    assert names(tab) == ["alpha", "beta", "gamma", "run"] and sorting(tab) == {"Run": "ascending"}
    tab.click(header("Run"))
    assert names(tab) == ["run", "gamma", "beta", "alpha"] and sorting(tab) == {"Run": "descending"}
    # Numbers begin with the largest, and what is missing comes last both ways.
    for last in range(2):
        tab.click(header("Certified"))
        assert names(tab)[-1] == "gamma", last
        values = tab.run(
            "[...document.querySelectorAll('.sortable tbody tr')]"
            ".map(r => r.cells[8].dataset.value).filter(v => v).map(Number)"
        )
        assert values == sorted(values, reverse=last == 0) and len(values) == 3
    tab.click(header("ε"))
    # Certified at 8/255, 0.1 (twice); gamma is to be robust to 0.3.
    assert names(tab)[0] == "gamma" and names(tab)[-1] == "run"


def test_sorting_by_keys(open_page: Open, several: Path) -> None:
    tab = open_page(several)
    tab.run(f"document.querySelector({json.dumps(header('#'))}).focus()")
    tab.press("Tab")
    assert tab.run("document.activeElement.firstChild.textContent") == "Run"
    ring = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.run(ring) == "solid"
    tab.press("Enter")
    assert names(tab) == ["alpha", "beta", "gamma", "run"]
    tab.press(" ")
    assert names(tab) == ["run", "gamma", "beta", "alpha"]
    assert tab.run("document.activeElement.firstChild.textContent") == "Run"


def test_the_first_tab_stop_skips_to_the_content(open_page: Open, single: Path) -> None:
    tab = open_page(single)
    tab.press("Tab")
    assert tab.run("document.activeElement.className") == "skip"
    assert tab.run("document.activeElement.getBoundingClientRect().top") >= 0
    tab.press("Enter")
    assert tab.run("document.activeElement.id") == "main"


BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LINE = "getComputedStyle(document.querySelector('.line.natural')).stroke"


def brightness(color: str) -> float:
    return sum(map(int, color[4:-1].split(",")[:3])) / 3


def test_dark_and_light(open_page: Open, single: Path) -> None:
    tab = open_page(single)
    button = "document.querySelector('button.theme')"
    assert brightness(tab.run(BACKGROUND)) > 200 > 100 > brightness(tab.run(LINE))
    assert tab.run(f"{button}.ariaPressed") == "false"
    tab.click("button.theme")
    assert brightness(tab.run(BACKGROUND)) < 60 and brightness(tab.run(LINE)) > 200
    assert tab.run(f"{button}.ariaPressed") == "true"
    tab.click("button.theme")
    assert brightness(tab.run(BACKGROUND)) > 200


def test_the_theme_of_the_system(open_page: Open, single: Path, tmp_path: Path) -> None:
    # The button's choice is kept for the same file, so this one has its own profile of choices.
    tab = open_page(single, dark=True)
    tab.run("localStorage.clear()")
    tab.run("delete document.documentElement.dataset.theme")
    assert brightness(tab.run(BACKGROUND)) < 60
    tab.click("button.theme")
    assert brightness(tab.run(BACKGROUND)) > 200
    tab.run("localStorage.clear()")
    with Image.open(tab.screenshot(tmp_path / "light.png")) as image:
        assert np.asarray(image.convert("L")).mean() > 150


def test_reading_off_a_chart(open_page: Open, single: Path) -> None:
    tab = open_page(single)
    reading = """(() => {
        const figure = document.querySelector("figure:has(svg.curves)");
        return [figure.querySelector(".epoch").textContent,
                ...[...figure.querySelectorAll(".value")].map(v => v.textContent)];
    })()"""
    assert tab.run(reading)[0] == ""
    tab.point_at("svg.curves")
    at_pointer = tab.run(reading)
    assert at_pointer[0] in ("epoch 2", "epoch 3") and all("%" in v for v in at_pointer[1:])
    tab.run("document.querySelector('svg.curves').focus()")
    tab.press("Home")
    assert tab.run(reading)[0] == "epoch 1"
    tab.press("ArrowRight")
    assert tab.run(reading)[0] == "epoch 2"
    tab.press("ArrowLeft")
    tab.press("ArrowLeft")
    assert tab.run(reading)[0] == "epoch 1"
    tab.run("document.activeElement.blur()")
    assert tab.run(reading)[0] == ""


def test_copying_a_command(open_page: Open, single: Path) -> None:
    tab = open_page(single)
    tab.browser.call(
        "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
    )
    tab.call("Page.bringToFront")
    tab.run("""
        const button = document.querySelector('button.copy');
        window.told = new Promise(tell => {
            new MutationObserver(() => tell(button.textContent)).observe(button, {childList: true});
        });
        undefined;
    """)
    tab.click("button.copy")
    assert tab.run("window.told") == "Copied"
    copied = tab.run("navigator.clipboard.readText()")
    assert copied.startswith("tightrope train --out")


def test_printing(open_page: Open, several: Path) -> None:
    tab = open_page(several, dark=True)
    opened = "document.querySelectorAll('details[open]').length"
    assert tab.run(opened) == 2
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run(opened) == 8
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run(BACKGROUND) == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.run("dispatchEvent(new Event('afterprint'))")
    assert tab.run(opened) == 2
    assert len(tab.call("Page.printToPDF")["data"]) > 10_000


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
    tab = open_page(tr.report(run).page)
    assert tab.run("document.querySelector('h1').textContent") == EVIL
    assert EVIL in tab.run("document.querySelector('#gallery').textContent")
    assert EVIL in tab.run("document.querySelector('code').textContent")
    assert tab.run("window.broken === undefined")
    assert tab.run("document.querySelectorAll('main script:not([type])').length") == 0


def test_the_policy_stops_what_would_slip_through(
    browser: Browser, single: Path, tmp_path: Path
) -> None:
    """Even if text became markup one day, the browser would not run or load it."""
    page = tmp_path / "attacked.html"
    html = single.read_text(encoding="utf-8")
    attack = "<script>window.broken=1</script><img src='http://localhost:9/x.png'>"
    assert "</main>" in html
    page.write_text(html.replace("</main>", f"{attack}</main>"), encoding="utf-8")
    tab = Tab(browser, page)
    browser.listen_until(
        lambda: any("Content Security Policy" in problem for problem in tab.problems()),
        "a violation of the policy",
    )
    tab.settle()
    assert tab.run("window.broken === undefined")
    blocked = [event for event in tab.of("Network.loadingFailed") if event.get("blockedReason")]
    assert all(event["blockedReason"] == "csp" for event in blocked)
    assert not [e for e in tab.of("Network.responseReceived") if "localhost" in str(e)]
    tab.close()


def test_a_page_moved_elsewhere_still_works(open_page: Open, single: Path, tmp_path: Path) -> None:
    moved = tmp_path / "far away" / "p%20q.html"
    moved.parent.mkdir()
    shutil.copy(single, moved)
    tab = open_page(moved)
    assert tab.run("document.querySelectorAll('main > section').length") == len(SECTIONS)
