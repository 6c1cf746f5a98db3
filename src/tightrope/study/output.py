"""The files of a result: tables, claims and figures, each written in one go."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tightrope.files import write_bytes, write_json, write_text
from tightrope.study.experiment import Claim, Picture, Result, Table

# The names of all that is written here.
NAMES = re.compile(r"table(-.+)?\.csv|(table|claims)\.(md|json)|.+\.(svg|png)")


def write_result(result: Result, folder: Path) -> None:
    """Write `table.md`, `table.csv`, `table.json`, `claims.md` and `claims.json`.

    The first table is `table.csv`, further ones `table-NAME.csv`.
    """
    write_text(folder / "table.md", result_page(result))
    for i, table in enumerate(result.tables):
        name = "table.csv" if i == 0 else f"table-{table.name}.csv"
        write_text(folder / name, to_csv(table))
    write_json(folder / "table.json", to_json(result))
    write_text(folder / "claims.md", claims_page(result))
    write_json(folder / "claims.json", [asdict(claim) for claim in result.claims])


def to_json(result: Result) -> dict[str, Any]:
    """Return everything about a result as plain values."""
    tables = [
        {
            "name": table.name,
            "title": table.title,
            "columns": {column.name: column.title for column in table.columns},
            "formats": {column.name: column.form for column in table.columns},
            "rows": [{k: _finite(v) for k, v in row.items()} for row in table.rows],
        }
        for table in result.tables
    ]
    return {
        "name": result.name,
        "scale": result.scale,
        "claim": result.claim,
        "where": result.where,
        "tables": tables,
        "claims": [asdict(claim) for claim in result.claims],
        "failures": dict(result.failures),
        "problems": list(result.problems),
        "figures": list(result.figures),
        **result.record,
    }


def result_page(result: Result) -> str:
    """Return the tables as Markdown, with what went wrong above them."""
    lines = [f"# {result.name} ({result.scale} scale)", "", f"{result.claim} ({result.where})", ""]
    for name, reason in result.failures.items():
        lines += [f"**Failed:** run {_plain(name)}: {_plain(reason)}", ""]
    for problem in result.problems:
        lines += [f"**Problem:** {_plain(problem)}", ""]
    for table in result.tables:
        lines += [f"## {table.title}", "", *_markdown(table), ""]
    return "\n".join(lines)


def claims_page(result: Result) -> str:
    """Return the verdicts as Markdown."""
    lines = [f"# {result.name} ({result.scale} scale): what holds", ""]
    lines += ["| claim | paper | verdict | evidence |", "|---|---|---|---|"]
    lines += [_claim_row(claim) for claim in result.claims]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """Return a table as CSV: one line of column names, empty cells where there is no number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [column.name for column in table.columns]
    writer.writerow(names)
    for row in table.rows:
        writer.writerow(["" if row.get(n) is None else row[n] for n in names])
    return text.getvalue()


def draw(pictures: Iterable[Picture], folder: Path) -> list[str] | None:
    """Draw figures as SVG and PNG and return their names; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    # The same numbers give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "tightrope"
    from matplotlib import pyplot as plt

    names = []
    for picture in pictures:
        figure = picture.draw(plt)
        figure.tight_layout()
        for kind, metadata in (("svg", {"Date": None}), ("png", None)):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=130, metadata=metadata)
            path = folder / f"{picture.name}.{kind}"
            write_bytes(path, buffer.getvalue())
            names.append(path.name)
        plt.close(figure)
    return names


def _markdown(table: Table) -> list[str]:
    titles: Sequence[str] = [column.title for column in table.columns]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(map(_plain, cells)) + " |" for cells in table.cells()]
    return lines


def _claim_row(claim: Claim) -> str:
    cells = (claim.text, claim.where, f"**{claim.verdict}**", claim.evidence)
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """Keep a cell on its line and in its column."""
    return " ".join(text.split()).replace("|", "\\|")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
