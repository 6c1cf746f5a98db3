"""`main`: natural and certified accuracy of the methods in the paper's five settings."""

from __future__ import annotations

from typing import Any

from tightrope.study import families, published
from tightrope.study.experiment import Claim, Column, Experiment, Findings, Picture, Table, Value
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import label, scatter
from tightrope.study.plans import Plan

METHODS = ("pgd", "ibp", "sabr", "taps", "staps", "mtl-ibp")
WHERE = "Table 1; Section 4.1"


def groups(scale: str) -> dict[str, str]:
    """Return the groups of runs that differ in the method only, and the setting of each."""
    if scale == "paper":
        return {setting: setting for setting in families.SETTINGS}
    nets = {"mnist": ("cnn3", "cnn7"), "cifar10": ("cnn5",)}
    return {
        f"{setting}-{net}": setting
        for setting in families.SETTINGS
        for net in nets.get(setting.split("-")[0], ())
    }


def plans(scale: str) -> list[Plan]:
    """Every method in every setting."""
    made = []
    for group, setting in groups(scale).items():
        for method in METHODS:
            if scale == "paper":
                made.append(families.paper(setting, method))
            else:
                net = group.removeprefix(f"{setting}-")
                made.append(families.laptop(setting, net, method))
    return made


def analyse(runs: Measurements) -> Findings:
    """Put our accuracies beside the paper's."""
    columns = (
        Column("group", "setting"),
        Column("method", "method"),
        Column("natural", "natural"),
        Column("adversarial", "adversarial"),
        Column("certified", "certified"),
        Column("samples", "samples", "d"),
        Column("paper_natural", "paper: natural"),
        Column("paper_certified", "certified"),
    )
    rows, claims, drawn = [], [], {}
    everything = groups(runs.scale)
    tried = {g for g in everything if any(runs.tried(f"{g}-{m}") for m in METHODS)}
    for group, setting in everything.items():
        claims += _claims(runs, group, setting)
        if tried and group not in tried:  # with --only: rows without a number help nobody
            continue
        for method in METHODS:
            rows.append(_row(runs, group, setting, method))
        points = {
            str(row["key"]): (row["natural"], row["certified"])
            for row in rows
            if row["group"] == group and row["certified"] is not None
        }
        if points:
            drawn[group] = points
    pictures = (Picture("accuracies", lambda plt: _draw(plt, drawn)),) if drawn else ()
    title = "Natural and certified accuracy, % (the paper: CNN7 on the full test set)"
    return Findings((Table("main", title, columns, tuple(rows)),), tuple(claims), pictures)


def _row(runs: Measurements, group: str, setting: str, method: str) -> dict[str, Value]:
    name = f"{group}-{method}"
    natural, certified = published.MAIN[setting].get(method, (None, None))
    return {
        "group": group,
        "key": method,
        "method": label(method),
        "natural": runs.value(name, lambda run: run.natural),
        "adversarial": runs.value(name, lambda run: run.adversarial),
        "certified": runs.value(name, lambda run: run.certified),
        "samples": runs.value(name, lambda run: run.samples),
        "paper_natural": natural,
        "paper_certified": certified,
    }


def _claims(runs: Measurements, group: str, setting: str) -> list[Claim]:
    ibp, sabr, taps, staps = (f"{group}-{m}" for m in families.CERTIFIED)
    found = [
        runs.judge(
            f"{group}: TAPS improves on both the natural and the certified accuracy of IBP.",
            "Table 1",
            [ibp, taps],
            lambda i, t: (
                t.natural > i.natural and t.certified > i.certified,
                f"IBP {_pair(i)}, TAPS {_pair(t)} on {_samples(t)}",
            ),
        ),
        runs.judge(
            f"{group}: TAPS or STAPS has the highest certified accuracy of IBP, SABR, TAPS and "
            "STAPS.",
            "Table 1",
            [ibp, sabr, taps, staps],
            _highest,
        ),
    ]
    if setting != "cifar10-8-255":  # there, the paper's own numbers say the opposite
        found.append(
            runs.judge(
                f"{group}: STAPS improves on the certified accuracy of SABR.",
                "Table 1",
                [sabr, staps],
                lambda a, b: (
                    b.certified > a.certified,
                    f"SABR {_pair(a)}, STAPS {_pair(b)} on {_samples(b)}",
                ),
            )
        )
    return found


def _highest(*four: Measured) -> tuple[bool, str]:
    values = dict(zip(families.CERTIFIED, (run.certified for run in four), strict=True))
    best = max(values["taps"], values["staps"]) > max(values["ibp"], values["sabr"])
    text = ", ".join(f"{label(name)} {value:.2f}" for name, value in values.items())
    return best, f"{text} on {_samples(four[-1])}"


def _pair(run: Measured) -> str:
    return f"{run.natural:.2f} / {run.certified:.2f}"


def _samples(run: Measured) -> str:
    return f"{run.samples} samples (certified ± {run.noise:.2f})"


def _draw(plt: Any, drawn: dict[str, Any]) -> Any:
    figure, grid = plt.subplots(1, len(drawn), figsize=(4.5 * len(drawn), 3.8), squeeze=False)
    for axes, (group, points) in zip(grid[0], drawn.items(), strict=True):
        scatter(axes, points)
        axes.set_title(group)
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="main",
    claim="TAPS and STAPS certify more than IBP and SABR, and TAPS beats IBP in natural "
    "accuracy, too.",
    where=WHERE,
    plans=plans,
    analyse=analyse,
    paper_minutes=34_000,
)
