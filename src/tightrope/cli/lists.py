"""`tightrope nets`, `methods`, `presets` and `data`: what there is to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tightrope.cli.output import console, print_json, print_table, sample_bar
from tightrope.training.presets import describe_presets

_json = click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")


@click.command()
@_json
def nets(as_json: bool) -> None:
    """List the architectures."""
    from tightrope.nets import describe

    found = describe()
    if as_json:
        print_json([vars(net) for net in found])
        return
    print_table(
        "architectures (sizes for MNIST)",
        ("name", "layers", "parameters", "settings", "description"),
        [
            (
                net.name,
                net.layers,
                f"{net.parameters:,}",
                " ".join(f"{k}={v}" for k, v in net.arguments.items()),
                net.description,
            )
            for net in found
        ],
    )


@click.command()
@click.argument("name", required=False)
@_json
def methods(name: str | None, as_json: bool) -> None:
    """List the training methods and their options.

    With NAME, say what the options of that method mean.
    """
    from tightrope.training.objectives import METHODS, method_options, section

    if name is not None:
        _explain(name, as_json)
        return
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": method.summary,
            "section": section(name),
            "options": {k: f.default for k, f in method_options(name).items()},
        }
        for name, method in METHODS.items()
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        "training methods",
        ("name", "what it minimises", "options"),
        [
            (
                r["name"],
                r["summary"],
                " ".join(f"{r['section']}.{k}={v}" for k, v in r["options"].items()) or "-",
            )
            for r in rows
        ],
    )


def _explain(name: str, as_json: bool) -> None:
    from tightrope.training.objectives import find_method, method_options, section

    rows = [
        {"option": f"{section(name)}.{k}", "default": f.default, "meaning": f.metadata.get("help")}
        for k, f in method_options(name).items()
    ]
    if as_json:
        print_json(rows)
    else:
        cells = [(r["option"], str(r["default"]), str(r["meaning"] or "")) for r in rows]
        print_table(f"{name}: {find_method(name).summary}", ("option", "default", "meaning"), cells)


@click.command()
@_json
def presets(as_json: bool) -> None:
    """List the presets for `tightrope train --preset`."""
    rows = describe_presets()
    if as_json:
        print_json([{"name": name, "summary": summary} for name, summary in rows])
    else:
        print_table("presets", ("name", "what it is"), rows)


@click.group()
def data() -> None:
    """List data sets, or download one."""


@data.command("list")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where to look.")
@_json
def list_data(data_dir: Path | None, as_json: bool) -> None:
    """List the data sets and which of them are here."""
    from tightrope.data import describe

    rows = describe(data_dir)
    if as_json:
        print_json([vars(row) for row in rows])
        return
    print_table(
        "data sets (your own: an .npz file or an image folder)",
        ("name", "shape", "classes", "here", "where"),
        [
            (
                d.name,
                " x ".join(map(str, d.shape)),
                d.classes,
                "yes" if d.available else "no",
                d.origin,
            )
            for d in rows
        ],
    )


@data.command("fetch")
@click.argument("name")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where to put it.")
@_json
def fetch_data(name: str, data_dir: Path | None, as_json: bool) -> None:
    """Download a data set from its official site."""
    from tightrope.data import default_data_dir, fetch

    with sample_bar("bytes", quiet=as_json) as update:
        path = fetch(name, data_dir or default_data_dir(), progress=update)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        console.print(f"{name} is in {path}")
