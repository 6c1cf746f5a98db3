"""Tables of what there is to choose from, made from the code: settings, methods, networks.

`{settings}`, `{method-options}`, `{architectures}`, `{layers}`, `{presets}`, `{experiments}` and
`{limits}` take no content.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from doc_tables import Cell, code, paragraph, section, table, text
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tightrope import nets
from tightrope.graph.trace.converters import LAYERS
from tightrope.limits import LIMITS
from tightrope.radius import format_radius
from tightrope.study.experiment import SCALES
from tightrope.study.experiments import EXPERIMENTS
from tightrope.training.objectives import METHODS, method_options
from tightrope.training.objectives import section as section_of
from tightrope.training.presets import describe_presets
from tightrope.training.settings import Settings, describe_settings


class TrainingSettings(SphinxDirective):
    """Every setting of a training."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        kinds = {f.name: str(f.type) for f in dataclasses.fields(Settings)}
        rows = [
            (code(name), code(_kind(kinds[name])), _default(default), text(meaning))
            for name, default, meaning in describe_settings()
        ]
        return [table(("setting", "type", "default", "meaning"), rows)]


class MethodOptions(SphinxDirective):
    """Every method with its options."""

    def run(self) -> list[nodes.Node]:
        """Return a section per method."""
        return [_method(name) for name in METHODS]


def _method(name: str) -> nodes.section:
    method, head = METHODS[name], section_of(name)
    options = [
        (
            code(f"{head}.{option}"),
            code(_kind(str(field.type))),
            _default(field.default),
            text(field.metadata["help"]),
        )
        for option, field in method_options(name).items()
    ]
    content: nodes.Node = paragraph("It takes no options.")
    if options:
        content = table(("option", "type", "default", "meaning"), options)
    summary = method.summary[0].upper() + method.summary[1:]
    start = paragraph(f"{summary}. In Python: ", code(f"tr.{method.__name__}"), ".")
    return section(name, f"method-{name}", start, content)


class Architectures(SphinxDirective):
    """Every architecture with its settings."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        rows: list[tuple[Cell, ...]] = [
            (
                code(net.name),
                net.layers,
                f"{net.parameters:,}",
                code(" ".join(f"{k}={v}" for k, v in net.arguments.items())),
                text(net.description),
            )
            for net in nets.describe()
        ]
        header = ("name", "layers", "parameters", "settings", "description")
        return [table(header, rows, numeric=(2,))]


class Layers(SphinxDirective):
    """Every layer that can be traced."""

    def run(self) -> list[nodes.Node]:
        """Return them in one paragraph."""
        names = [part for name in LAYERS for part in (code(name), ", ")]
        return [paragraph(*names[:-1], ".")]


class Presets(SphinxDirective):
    """Every preset."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        rows = [(code(name), text(line)) for name, line in describe_presets()]
        return [table(("preset", "what it is"), rows)]


class Experiments(SphinxDirective):
    """Everything `tightrope reproduce` knows."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        rows = [
            (
                code(experiment.name),
                experiment.claim,
                experiment.where,
                *(str(len(experiment.plans(scale))) for scale in SCALES),
            )
            for experiment in EXPERIMENTS.values()
        ]
        header = ("name", "claim", "in the paper", *(f"runs, {scale}" for scale in SCALES))
        return [table(header, rows, numeric=(3, 4))]


def _kind(annotation: str) -> str:
    """Return a type as users write it after `--set`: a radius is a number or a fraction."""
    return annotation.replace("Fraction", "radius").replace("tuple[int, ...]", "list of int")


def _default(value: Any) -> Cell:
    if value is None or value is dataclasses.MISSING:
        return "-"
    return code(format_radius(value) if isinstance(value, Fraction) else str(value))


class Limits(SphinxDirective):
    """How large files may be."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        rows = [
            (code(limit.variable), text(limit.meaning), f"{limit.default:,} {limit.unit}".strip())
            for limit in LIMITS.values()
        ]
        return [table(("variable", "of", "default"), rows, numeric=(2,))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("settings", TrainingSettings)
    app.add_directive("method-options", MethodOptions)
    app.add_directive("architectures", Architectures)
    app.add_directive("layers", Layers)
    app.add_directive("presets", Presets)
    app.add_directive("experiments", Experiments)
    app.add_directive("limits", Limits)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
