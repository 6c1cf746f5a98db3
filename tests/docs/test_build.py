"""The site builds without a warning, is complete, and asks no other machine for anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, PAGES

from tightrope.training.objectives import METHODS, method_options, section
from tightrope.training.settings import describe_settings

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("sphinx", "myst_parser", "furo", "sphinx_click")),
    reason="the documentation needs Sphinx: pip install 'tightrope[docs]'",
)

# As `tightrope reproduce` writes it; the text has characters that markup would swallow.
RESULT: dict[str, Any] = {
    "name": "connector",
    "scale": "laptop",
    "claim": "A *made-up* claim | about c.",
    "where": "Figure 8",
    "tables": [
        {
            "name": "connector",
            "title": "Accuracies of made-up runs",
            "columns": {"c": "c", "certified": "certified", "paper": "paper: certified"},
            "formats": {"c": "g", "certified": ".2f", "paper": ".2f"},
            "rows": [
                {"c": 0.0, "certified": 81.23456, "paper": None},
                {"c": 0.5, "certified": 82.5, "paper": 93.62},
            ],
        }
    ],
    "claims": [
        {"text": "It works.", "where": "p. 1", "verdict": "holds", "evidence": "82.50 > 81.23"},
        {"text": "Or so.", "where": "p. 2", "verdict": "does not hold", "evidence": "3 < 4"},
    ],
    "failures": {"broken-run": "out of memory"},
    "problems": [],
    "figures": ["curve.svg", "curve.png"],
    "runs": {
        "made-up-0": {
            "seed": 7,
            "commands": ["tightrope train --preset demo --out x"],
            "training_seconds": 1234.5,
        }
    },
    "seconds": 99.0,
    "versions": {"tightrope": "0.0.0", "torch": "9.9"},
    "machine": {"cpus": 2},
    "plots": True,
}
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def build(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    folders = ["-d", str(out / "doctrees"), str(source), str(out / "html")]
    return subprocess.run([*command, *options, *folders], capture_output=True, text=True)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, with one more result than there is."""
    folder = tmp_path_factory.mktemp("site")
    results = folder / "results"
    shutil.copytree(DOCS / "results", results)
    shutil.rmtree(results / "connector", ignore_errors=True)
    (results / "connector").mkdir()
    (results / "connector" / "table.json").write_text(json.dumps(RESULT), encoding="utf-8")
    (results / "connector" / "curve.svg").write_text(SVG, encoding="utf-8")
    done = build(DOCS, folder, "-D", f"results_dir={results}")
    assert done.returncode == 0, done.stderr
    return folder / "html"


def text(site: Path, page: str) -> str:
    return (site / page).read_text(encoding="utf-8")


def test_every_page_is_there(site: Path) -> None:
    assert {"index.md", "tutorial.md", "results.md", "howto/own-network.md"} <= set(PAGES)
    for page in PAGES:
        assert (site / page).with_suffix(".html").is_file()


def test_the_reference_has_the_public_names(site: Path) -> None:
    import tightrope

    page = text(site, "reference/python.html")
    for name in set(tightrope.__all__) - {"__version__"}:
        assert f'id="tightrope.{name}"' in page, f"{name} is not in the reference"
    assert "robust" in page and "Train a network and return its run folder." in page


def test_the_command_line_has_every_command(site: Path) -> None:
    page = text(site, "reference/cli.html")
    for command in ("train", "certify", "verify", "reproduce", "report", "data-fetch"):
        assert f'id="tightrope-{command}"' in page
    assert "--timeout" in page and "–preset" not in page


def test_all_settings_are_listed(site: Path) -> None:
    page = text(site, "reference/settings.html")
    options = [f"{section(m)}.{option}" for m in METHODS for option in method_options(m)]
    for name in (*(name for name, _, _ in describe_settings()), *options):
        assert f">{name}<" in page


def test_a_recorded_result_is_shown(site: Path) -> None:
    page = text(site, "results.html")
    for part in ("A *made-up* claim | about c.", "81.23", "82.50", "93.62", "paper: certified"):
        assert part in page
    for part in ("It works.", "verdict-holds", "verdict-fails", "82.50 &gt; 81.23", "broken-run"):
        assert part in page
    for part in ("made-up-0", ">7<", ">1234<", "torch 9.9", "Made by", "--preset demo"):
        assert part in page
    assert "curve.svg" in page and (site / "_images" / "curve.svg").is_file()
    assert "curve.png" not in page


def test_benchmarks_are_shown(site: Path) -> None:
    page = text(site, "benchmarks.html")
    for file in (DOCS / "results" / "benchmarks").glob("*.txt"):
        assert f'id="benchmark-{file.stem}"' in page


class Resources(HTMLParser):
    """Collects what a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.append(given.get("src") or "")
        elif tag == "link":
            self.found.append(given.get("href") or "")
        elif tag == "object":
            self.found.append(given.get("data") or "")


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    seen = 0
    for page in site.rglob("*.html"):
        resources = Resources()
        resources.feed(page.read_text(encoding="utf-8"))
        seen += len(resources.found)
        outside = [r for r in resources.found if r.startswith(("http:", "https:", "//"))]
        assert not outside, f"{page} loads {outside}"
    assert seen > 100
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text(encoding="utf-8"), sheet


def test_formulas_have_their_script(site: Path) -> None:
    assert "mathjax/tex-svg.js" in text(site, "index.html")
    assert (site / "_static" / "mathjax" / "tex-svg.js").stat().st_size > 1_000_000


CONF = """
import sys
sys.path.insert(0, {extensions!r})
extensions = ["myst_parser", "recorded_results", "result_role"]
"""


def small_site(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    """Build one page whose results are in `results` beside it."""
    conf = CONF.format(extensions=str(DOCS / "_extensions"))
    (folder / "conf.py").write_text(conf, encoding="utf-8")
    (folder / "index.md").write_text(f"# Page\n\n{page}\n", encoding="utf-8")
    return build(folder, folder / "out")


def test_the_role_reads_committed_numbers_and_results_may_be_absent(tmp_path: Path) -> None:
    (tmp_path / "results" / "a").mkdir(parents=True)
    numbers = {"certified": 0.88474, "stages": [{"bab": 12}]}
    (tmp_path / "results" / "a" / "b.json").write_text(json.dumps(numbers), encoding="utf-8")
    page = "{result}`a/b.json certified .2%` and {result}`a/b.json stages.0.bab`\n\n"
    done = small_site(
        tmp_path, page + "```{recorded-results}\n```\n\n```{recorded-benchmarks}\n```"
    )
    assert done.returncode == 0, done.stderr
    html = text(tmp_path / "out" / "html", "index.html")
    assert ">88.47%<" in html and ">12<" in html
    assert "No experiment is recorded yet." in html and "No benchmark" in html


def test_a_number_that_is_not_there_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "b.json").write_text('{"d": {}}', encoding="utf-8")
    wrong = ("c.json x", "b.json no.such", "b.json", "b.json d")
    done = small_site(tmp_path, "\n\n".join(f"{{result}}`{content}`" for content in wrong))
    assert done.returncode != 0 and done.stderr.count("result:") == len(wrong)
