"""Pages made of committed results: `{recorded-results}` and `{recorded-benchmarks}`.

The first shows every `*/table.json` of the results folder, as `tightrope reproduce` wrote it,
with the figures beside it; the second every text file in `benchmarks`. The folder is the
configuration value `results_dir`, relative to the documentation.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from doc_tables import block, code, folded, paragraph, section, table
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tightrope.study.experiment import Column, Table, Verdict
from tightrope.study.experiments import EXPERIMENTS

CLASSES = {Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.UNTESTED: "untested"}


class _FromResults(SphinxDirective):
    """A directive whose content is in the results folder."""

    @property
    def folder(self) -> Path:
        """The results folder."""
        return Path(self.env.app.confdir) / self.config.results_dir

    def read(self, path: Path) -> str:
        """Return a file's text and remember that the page depends on it."""
        self.env.note_dependency(str(path))
        return path.read_text(encoding="utf-8")


class RecordedResults(_FromResults):
    """A section per experiment that was recorded."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, in the order of `tightrope reproduce --list`."""
        self.env.note_reread()  # a new folder is not a dependency yet
        order = {name: i for i, name in enumerate(EXPERIMENTS)}
        files = sorted(
            self.folder.glob("*/table.json"),
            key=lambda file: (order.get(file.parent.name, len(order)), file.parent.name),
        )
        if not files:
            return [paragraph("No experiment is recorded yet.")]
        results = {file.parent: json.loads(self.read(file)) for file in files}
        return [_overview(results), *(self.experiment(*item) for item in results.items())]

    def experiment(self, folder: Path, result: Mapping[str, Any]) -> nodes.section:
        """Return everything about one experiment."""
        page = section(
            result["name"],
            f"results-{folder.name}",
            paragraph(f"{result['claim']} ({result['where']}; {result['scale']} scale.)"),
            *_troubles(result),
            *_claims(result["claims"]),
        )
        for number, content in enumerate(result["tables"]):
            name = f"results-{folder.name}-{number}"
            page += section(content["title"], name, _numbers(content))
        page += list(self.figures(folder, result["figures"]))
        page += _record(result)
        return page

    def figures(self, folder: Path, names: Sequence[str]) -> Iterator[nodes.image]:
        """Yield the figures that lie beside the table: each once, as SVG if there is one."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for stem in dict.fromkeys(Path(name).stem for name in names):
            kinds = [folder / f"{stem}{kind}" for kind in (".svg", ".png")]
            found = next((path for path in kinds if path.exists()), None)
            if found is not None:
                uri = Path(os.path.relpath(found, here)).as_posix()
                yield nodes.image(uri=uri, alt=f"{folder.name}: {stem}")


def _overview(results: Mapping[Path, Mapping[str, Any]]) -> nodes.table:
    """Count the verdicts of every experiment."""
    rows = []
    for folder, result in results.items():
        verdicts = [claim["verdict"] for claim in result["claims"]]
        link = nodes.reference("", result["name"], refid=f"results-{folder.name}", internal=True)
        counts = [str(verdicts.count(verdict)) for verdict in Verdict]
        rows.append((link, result["where"], *counts))
    return table(("experiment", "in the paper", *Verdict), rows, numeric=(2, 3, 4))


def _troubles(result: Mapping[str, Any]) -> Iterator[nodes.Node]:
    """Yield what went wrong, which must not go unseen."""
    for name, reason in result["failures"].items():
        yield nodes.warning("", paragraph("The run ", code(name), f" failed: {reason}"))
    for problem in result["problems"]:
        yield nodes.warning("", paragraph(problem))


def _claims(claims: Sequence[Mapping[str, str]]) -> list[nodes.Node]:
    """Return the verdicts; a claim is never shown without its evidence."""
    if not claims:
        return []
    rows = []
    for claim in claims:
        kind = CLASSES.get(Verdict(claim["verdict"]), "untested")
        verdict = nodes.inline("", claim["verdict"], classes=[f"verdict-{kind}"])
        rows.append((claim["text"], claim["where"], verdict, claim["evidence"]))
    return [table(("claim", "in the paper", "verdict", "evidence"), rows)]


def _numbers(content: Mapping[str, Any]) -> nodes.table:
    """Return a table of numbers, each written as the experiment's column says."""
    columns = [
        Column(name, title, content["formats"][name]) for name, title in content["columns"].items()
    ]
    shown = Table(content["name"], content["title"], tuple(columns), tuple(content["rows"]))
    numeric = [
        i
        for i, column in enumerate(columns)
        if not any(isinstance(row.get(column.name), str) for row in shown.rows)
    ]
    return table([column.title for column in columns], shown.cells(), numeric)


def _record(result: Mapping[str, Any]) -> list[nodes.Node]:
    """Return what it takes to repeat a result."""
    runs = result.get("runs", {})
    header = ("run", "seed", "training, s", "certification, s")
    fields = ("seed", "training_seconds", "certification_seconds")
    columns = [_seconds([run.get(name) for run in runs.values()]) for name in fields]
    rows = [(code(name), *cells) for name, *cells in zip(runs, *columns, strict=True)]
    commands = [command for run in runs.values() for command in run.get("commands", ())]
    versions = ", ".join(f"{name} {text}" for name, text in result.get("versions", {}).items())
    content: list[nodes.Node] = [
        paragraph(
            "Made by ", code(f"tightrope reproduce {result['name']} --scale {result['scale']}")
        )
    ]
    if versions:
        cores = result.get("machine", {}).get("cpus")
        content.append(paragraph(f"Versions: {versions}; {cores} CPU cores."))
    if rows:
        content.append(table(header, rows, numeric=(1, 2, 3)))
    if commands:
        content += [paragraph("The same by hand:"), block("\n".join(commands), "console")]
    return folded("Commands, seeds, versions and seconds", *content)


def _seconds(values: Sequence[Any]) -> list[str]:
    return ["-" if v is None else f"{v:.0f}" for v in values]


class RecordedBenchmarks(_FromResults):
    """The output of the benchmarks, as it was recorded."""

    def run(self) -> list[nodes.Node]:
        """Return a section per file."""
        self.env.note_reread()
        files = sorted((self.folder / "benchmarks").glob("*.txt"))
        return [
            section(file.stem, f"benchmark-{file.stem}", block(self.read(file))) for file in files
        ] or [paragraph("No benchmark is recorded yet.")]


def adapt_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adapt links of the results folder's README, which are made for reading it on its own.

    Tables and claims are parts of the page of results here; folders have no page.
    """
    if docname != "results/README":
        return
    here = Path(app.confdir) / "results"

    def adapt(link: re.Match[str]) -> str:
        target = here / link["target"]
        if not target.suffix:
            return link["text"]
        is_result = target.suffix == ".md" and (target.parent / "table.json").exists()
        return f"[{link['text']}](../results.md)" if is_result else link[0]

    source[0] = re.sub(r"\[(?P<text>[^]\n]*)\]\((?P<target>[^)\s]*)\)", adapt, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_config_value("results_dir", "results", "env")
    app.connect("source-read", adapt_links)
    app.add_directive("recorded-results", RecordedResults)
    app.add_directive("recorded-benchmarks", RecordedBenchmarks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
