"""`main`: natural and certified accuracy of the methods in the paper's five settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tightrope.study import columns, families, published
from tightrope.study.columns import first
from tightrope.study.experiment import Claim, Column, Experiment, Picture, Row, Sheet, Table
from tightrope.study.measured import Measured, Measurements
from tightrope.study.pictures import label, scatter
from tightrope.study.plans import Plan
from tightrope.training.objectives import METHODS, Guarantee

# The paper's table from the best known to its own; then what it does not have.
TABLE_1 = ("colt", "ibp", "sortnet", "ibp-r", "sabr", "taps", "staps")


def methods() -> list[str]:
    """Return all methods, those of the paper's table first."""
    return sorted(METHODS, key=lambda m: TABLE_1.index(m) if m in TABLE_1 else len(TABLE_1))


def plans(scale: str) -> list[Plan]:
    """Return every run: one for each setting, network and method, and each helper's."""
    return columns.plans_of([*rows(scale), *votes(scale), *helped(scale)[1:]])


def rows(scale: str) -> list[Row]:
    """Return the runs that are certified, those trained to be proved before the others."""
    return _rows(scale, Guarantee.DETERMINISTIC, Guarantee.NONE)


def votes(scale: str) -> list[Row]:
    """Return the runs whose votes under noise are counted."""
    return _rows(scale, Guarantee.PROBABILISTIC)


def helped(scale: str) -> list[Row]:
    """Return the runs of TAPS with a helper, behind the one without; on a laptop only."""
    if scale == "paper":
        return []
    plain = families.laptop("mnist-0.1", "cnn3", "taps")
    made = [("none", "-", plain)]
    made += [(key, found[0], families.helped(key)) for key, found in families.HELPERS.items()]
    return [
        Row({"group": "mnist-0.1-cnn3", "key": key, "helper": title}, (plan,))
        for key, title, plan in made
    ]


def _rows(scale: str, *guarantees: Guarantee) -> list[Row]:
    made = []
    for setting in families.SETTINGS:
        for group, found in families.trained(setting, scale).items():
            for guarantee in guarantees:
                chosen = [m for m in methods() if METHODS[m].guarantee is guarantee and m in found]
                made += [_row(setting, group, method, found[method]) for method in chosen]
    return made


def _row(setting: str, group: str, method: str, plan: Plan) -> Row:
    known = columns.paper("natural certified", published.MAIN[setting].get(method, (None, None)))
    known |= {"group": group, "key": method, "method": label(method)}
    return Row({**known, "guarantee": METHODS[method].guarantee.value}, (plan,))


def claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Compare the methods in every setting."""
    for setting in families.SETTINGS:
        for group, found in families.trained(setting, runs.scale).items():
            if {*families.CERTIFIED} <= {*found}:
                yield from _claims(runs, group, setting)


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


def draw(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw natural against certified accuracy, setting by setting."""
    drawn = tables[0].groups("certified")
    if drawn:
        yield Picture("accuracies", lambda plt: _draw(plt, drawn))


def _draw(plt: Any, drawn: Mapping[str, Any]) -> Any:
    figure, grid = plt.subplots(1, len(drawn), figsize=(4.5 * len(drawn), 3.8), squeeze=False)
    for axes, (group, rows) in zip(grid[0], drawn.items(), strict=True):
        known = [row for row in rows if row["certified"] is not None]
        scatter(axes, {row["key"]: (row["natural"], row["certified"]) for row in known})
        axes.set_title(group)
    return figure


def _helped(runs: Measurements) -> list[Row]:
    """Return the rows of helpers once one of them was begun: the first row is in another table."""
    found = helped(runs.scale)
    return found if any(runs.tried(name) for row in found[1:] for name in row.names) else []


def _setting(name: str) -> columns.Reading:
    """Read a setting of the votes."""
    return first(lambda run: run.votes["settings"].get(name))


def _accuracy(name: str) -> columns.Reading:
    """Read a share of the votes."""
    return first(lambda run: 100 * run.votes[name])


def _within(radius: str) -> columns.Reading:
    """Read the share of samples whose vote is right within an l2 radius."""
    return first(lambda run: _percent(run.votes["certified"].get(radius)))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


TABLE = Sheet(
    "main",
    "Natural and certified accuracy, % (the paper: CNN7 on the full test set)",
    (
        Column("group", "setting"),
        Column("key", ""),
        Column("method", "method"),
        Column("guarantee", "trained for a guarantee"),
        columns.NATURAL,
        columns.ADVERSARIAL,
        columns.CERTIFIED,
        columns.SAMPLES,
        Column("paper_natural", "paper: natural"),
        Column("paper_certified", "certified"),
    ),
    lambda runs: columns.only_tried(runs, rows(runs.scale), "group"),
)
HELPED = Sheet(
    "helpers",
    "Helpers beside TAPS, one at a time: natural and certified accuracy, %",
    (
        Column("group", "setting"),
        Column("key", ""),
        Column("helper", "helper"),
        columns.NATURAL,
        columns.ADVERSARIAL,
        columns.CERTIFIED,
        columns.SAMPLES,
    ),
    _helped,
)
VOTES = Sheet(
    "votes",
    "Another thing: votes under noise, %, each l2 radius with probability 1 - alpha only",
    (
        Column("group", "setting"),
        Column("key", ""),
        Column("method", "method"),
        *(Column(n, n, "g", _setting(n)) for n in ("sigma", "draws", "alpha")),
        Column("samples", "samples", "d", first(lambda run: run.votes["samples"])),
        *(Column(n, n, read=_accuracy(n)) for n in ("accuracy", "abstained")),
        *(Column(f"at {r}", f"at l2 {r}", read=_within(r)) for r in ("0.25", "0.5", "0.75", "1")),
    ),
    lambda runs: columns.only_tried(runs, votes(runs.scale), "group"),
)
EXPERIMENT = Experiment(
    name="main",
    claim="TAPS and STAPS certify more than IBP and SABR, and TAPS beats IBP in natural "
    "accuracy, too.",
    where="Table 1; Section 4.1",
    paper_minutes=34_000,
    plans=plans,
    tables=(TABLE, VOTES, HELPED),
    claims=claims,
    draw=draw,
)
