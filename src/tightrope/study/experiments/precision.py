"""`precision`: how far each approximation is from the exact worst margin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from statistics import fmean
from typing import Any

import numpy as np

from tightrope.study import families, published
from tightrope.study.columns import NATURAL, certified, count, deviation, first, mean, natural
from tightrope.study.experiment import (
    Claim,
    Column,
    Experiment,
    Picture,
    Row,
    Sheet,
    Table,
    Value,
)
from tightrope.study.measured import Measured, Measurements, Missing, over_seeds
from tightrope.study.pictures import histogram, label, scatter
from tightrope.study.plans import Plan

METHODS = ("pgd", "ibp", "sabr", "taps", "staps")
ESTIMATES = ("ibp", "pgd", "sabr", "taps")
SHOWN = ("ibp", "sabr", "taps", "pgd")  # in the table of accuracies
SEEDS = range(3)
POINT = 1.0
SMALL = 0.5
# Rounding of float32 networks, and the tolerance of the search.
NOISE = 1e-3
AGREEMENT = 1e-4


def plans(scale: str) -> list[Plan]:
    """One network per training method, and others of other seeds for their robust accuracy.

    At paper scale, all samples are solved exactly.
    """
    exact = 2000 if scale == "laptop" else families.ALL
    examined = [families.tiny(method, exact=exact, milp=500) for method in METHODS]
    return examined + [plan for group in repeated().values() for plan in group[1:]]


def repeated() -> dict[str, list[Plan]]:
    """Return the networks trained with bounds by method, one per seed, to be certified only."""
    return {
        method: [replace(families.tiny(method, seed), estimate={}) for seed in SEEDS]
        for method in families.CERTIFIED
    }


def errors(run: Measured) -> dict[str, np.ndarray]:
    """Return estimated less exact worst margin, for the samples that were solved exactly."""
    solved = [record for record in run.exact if record["by"] != "nobody"]
    index = [record["index"] for record in solved]
    # The attained end: the other one differs by the tolerance at most.
    exact = np.array([record["lower"] for record in solved])
    if not solved:
        raise Missing(f"no exact margin of {run.name} was found in time")
    estimated = {name: run.margins(name) for name in ESTIMATES}
    if max(index) >= min(map(len, estimated.values())):
        raise Missing(f"{run.name} has exact margins of samples without estimates")
    return {name: margins[index] - exact for name, margins in estimated.items()}


# --- tables -------------------------------------------------------------------------------------


def accuracy_rows(runs: Measurements) -> Iterator[Row]:
    """All seeds of each method; the first one is examined in full."""
    seeds = repeated()
    for method in METHODS:
        known: dict[str, Value] = {"method": label(method), "paper_exact": published.EXACT[method]}
        for by in SHOWN:
            known[f"paper_{by}"] = published.SHARES.get(method, {}).get(by)
        yield Row(known, tuple(seeds.get(method) or [families.tiny(method)]))


def _accuracy_columns() -> Iterator[Column]:
    yield Column("method", "trained by")
    yield NATURAL
    yield Column("exact", "robust, exact", read=first(certified))
    yield Column("seeds", "seeds", "d", count(certified))
    yield Column("mean", "mean", read=mean(certified))
    yield Column("deviation", "deviation", read=deviation(certified))
    yield Column("paper_exact", "paper")
    yield Column("undecided", "undecided", "d", first(lambda run: run.certification["unknown"]))
    for by in SHOWN:
        yield Column(by, f"by {label(by)}", read=first(methodcaller("accuracy", by)))
        yield Column(f"paper_{by}", "paper")


def error_rows(runs: Measurements) -> Iterator[Mapping[str, Value]]:
    """Compare each estimate with exact margins."""
    for method in METHODS:
        found = runs.value(f"tiny-{method}", errors)
        for name in ESTIMATES:
            row: dict[str, Value] = {"method": label(method), "estimate": label(name)}
            if found is not None:
                values = found[name]
                row |= {
                    "mean": float(values.mean()),
                    "absolute": float(np.abs(values).mean()),
                    "deviation": float(values.std()),
                    "samples": len(values),
                }
            names = ("paper_mean", "paper_absolute", "paper_deviation")
            yield row | dict(zip(names, published.ERRORS[method][name], strict=True))


def comparison_rows(runs: Measurements) -> Iterator[Mapping[str, Value]]:
    """Compare exact margins with those of a mixed-integer program."""
    for method in METHODS:
        yield {"method": label(method), **(runs.value(f"tiny-{method}", _compared) or {})}


def _compared(run: Measured) -> dict[str, Value]:
    compared = [record for record in run.exact if _by_program(record)]
    differences = [abs(record["lower"] - record["milp"]["lower"]) for record in compared]
    by = [record["by"] for record in run.exact]
    return {
        "solved": len(by) - by.count("nobody"),
        "by_search": by.count("search"),
        "open": by.count("nobody"),
        "compared": len(compared),
        "largest": max(differences, default=None),
        "contradictions": sum(contradicts(record) for record in compared),
    }


def _by_program(record: Mapping[str, Any]) -> bool:
    """Say whether a mixed-integer program was solved to the end, too."""
    return bool(record.get("milp") and record["milp"]["finished"])


def contradicts(record: Mapping[str, Any]) -> bool:
    """Say whether the two enclosures of a worst margin have nothing in common."""
    other = record["milp"]
    low = max(record["lower"], other["lower"])
    high = min(record["upper"], other["upper"])
    return bool(low > high + AGREEMENT)


def problems(runs: Measurements) -> Iterator[str]:
    """Return a line for each network on which the two exact methods contradict each other."""
    for method in METHODS:
        bad = runs.value(
            f"tiny-{method}", lambda run: [r for r in run.exact if r.get("milp") and contradicts(r)]
        )
        if bad:
            first = bad[0]
            yield (
                f"tiny-{method}: branch and bound and MILP contradict each other on {len(bad)} "
                f"samples, the first is {first['index']}: "
                f"[{first['lower']:.6g}, {first['upper']:.6g}] and "
                f"[{first['milp']['lower']:.6g}, {first['milp']['upper']:.6g}]"
            )


# --- claims -------------------------------------------------------------------------------------


def claims(runs: Measurements, tables: Sequence[Table]) -> list[Claim]:
    """Judge robust accuracy and the precision of estimates."""
    seeds = [plan.name for group in repeated().values() for plan in group]
    everyone = [f"tiny-{m}" for m in METHODS]
    judge = runs.judge
    return [
        judge(
            "Robust accuracy rises from IBP over SABR to TAPS, and STAPS is no worse than TAPS "
            "(half a point allowed), in the mean of three seeds.",
            "Figure 1",
            seeds,
            _in_order,
        ),
        judge(
            "Training by attack alone gives the least robust of the networks.",
            "Figure 1",
            everyone,
            lambda pgd, *rest: (
                all(pgd.certified < run.certified for run in rest),
                f"PGD {pgd.certified:.2f}, the others {_listed(rest)}",
            ),
        ),
        judge(
            "Ours, not the paper's: exact robust accuracy is within a point of the authors' "
            "networks (one seed each), in the mean of three seeds.",
            "Figure 1",
            seeds,
            _near_the_paper,
        ),
        judge(
            "On the TAPS-trained network TAPS is the most precise estimate: smallest mean "
            "absolute error and smallest deviation.",
            "Figure 5",
            ["tiny-taps"],
            _most_precise,
        ),
        judge(
            "On the TAPS-trained network TAPS' mean absolute error is below 0.05 and at least "
            "five times smaller than SABR's.",
            "Figures 1, 5",
            ["tiny-taps"],
            _five_times,
        ),
        judge(
            "TAPS is the most precise estimate on the IBP-, SABR- and STAPS-trained networks, too.",
            "Figure 9",
            ["tiny-ibp", "tiny-sabr", "tiny-staps"],
            lambda *three: _all_of(map(_most_precise, three)),
        ),
        judge(
            "IBP never estimates below the exact worst margin and PGD never above it.",
            "Figures 1, 9",
            everyone,
            _one_sided,
        ),
    ]


def _listed(found: Any) -> str:
    return ", ".join(f"{run.name.removeprefix('tiny-')} {run.certified:.2f}" for run in found)


def _by_method(found: Sequence[Measured]) -> dict[str, list[float]]:
    """Return the robust accuracies over seeds, of runs in the order of `repeated`."""
    values = [run.certified for run in found]
    return {m: values[i * len(SEEDS) :][: len(SEEDS)] for i, m in enumerate(repeated())}


def _in_order(*found: Measured) -> tuple[bool, str]:
    values = _by_method(found)
    ibp, sabr, taps, staps = (fmean(own) for own in values.values())
    text = ", ".join(f"{method} {over_seeds(own)}" for method, own in values.items())
    return ibp < sabr < taps and staps >= taps - SMALL, text


def _near_the_paper(*found: Measured) -> tuple[bool, str]:
    gaps = {m: fmean(own) - published.EXACT[m] for m, own in _by_method(found).items()}
    text = ", ".join(f"{method} {gap:+.2f}" for method, gap in gaps.items())
    return all(abs(gap) <= POINT for gap in gaps.values()), text


def _most_precise(run: Measured) -> tuple[bool, str]:
    found = errors(run)
    size = {name: float(np.abs(values).mean()) for name, values in found.items()}
    spread = {name: float(values.std()) for name, values in found.items()}
    best = min(size, key=lambda n: size[n]) == min(spread, key=lambda n: spread[n]) == "taps"
    text = ", ".join(f"{label(n)} {size[n]:.4f} ({spread[n]:.4f})" for n in found)
    return best, f"{run.name}: mean absolute error (deviation) {text}"


def _five_times(run: Measured) -> tuple[bool, str]:
    found = errors(run)
    taps, sabr = (float(np.abs(found[name]).mean()) for name in ("taps", "sabr"))
    return taps < 0.05 and sabr >= 5 * taps, f"TAPS {taps:.4f}, SABR {sabr:.4f}"


def _one_sided(*everyone: Measured) -> tuple[bool, str]:
    found = [errors(run) for run in everyone]
    low = min(float(values["ibp"].min()) for values in found)
    high = max(float(values["pgd"].max()) for values in found)
    return low >= -NOISE and high <= NOISE, f"IBP at least {low:+.4g}, PGD at most {high:+.4g}"


def _all_of(answers: Any) -> tuple[bool, str]:
    answers = list(answers)
    return all(yes for yes, _ in answers), "; ".join(text for _, text in answers)


# --- figures ------------------------------------------------------------------------------------


def draw(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw errors by training method, and the paper's first figure."""
    every = {method: runs.value(f"tiny-{method}", errors) for method in METHODS}
    found = {method: values for method, values in every.items() if values is not None}
    points = {}
    for method, group in repeated().items():
        names = [plan.name for plan in group]
        point = runs.mean(names, natural), runs.mean(names, certified)
        if None not in point:
            points[method] = point
    if found:
        yield Picture("errors", lambda plt: _by_training(plt, found))
    if {"ibp", "sabr", "taps"} <= set(found) and points:
        yield Picture("intro", lambda plt: _intro(plt, found, points))


def _by_training(plt: Any, found: Mapping[str, Any]) -> Any:
    figure, grid = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.4), squeeze=False)
    for axes, (method, values) in zip(grid[0], found.items(), strict=True):
        histogram(axes, values)
        axes.set(title=f"{label(method)}-trained", xlabel="estimated less exact worst margin")
    return figure


def _intro(plt: Any, found: Mapping[str, Any], points: Mapping[str, Any]) -> Any:
    figure = plt.figure(figsize=(9, 5))
    grid = figure.add_gridspec(3, 2, width_ratios=(2, 1))
    reach = max(float(np.quantile(np.abs(found[m][m]), 0.99)) for m in ("ibp", "sabr", "taps"))
    first = None
    for i, method in enumerate(("ibp", "sabr", "taps")):
        axes = figure.add_subplot(grid[i, 0], sharex=first)
        first = first or axes
        histogram(axes, {method: found[method][method]}, spread=reach)
    assert first is not None
    axes.set_xlabel("error of the estimate that each network was trained with")
    scatter(figure.add_subplot(grid[:, 1]), points)
    return figure


ACCURACIES = Sheet(
    "accuracies",
    "Test samples with a negative worst margin at 0.05, % (a proof for exact only)",
    tuple(_accuracy_columns()),
    accuracy_rows,
)
ERRORS = Sheet(
    "errors",
    "Error of the worst margin: estimated less exact",
    (
        Column("method", "trained by"),
        Column("estimate", "estimate"),
        Column("mean", "mean error", ".4f"),
        Column("absolute", "mean absolute", ".4f"),
        Column("deviation", "deviation", ".4f"),
        Column("samples", "samples", "d"),
        Column("paper_mean", "paper: mean", ".4g"),
        Column("paper_absolute", "absolute", ".4g"),
        Column("paper_deviation", "deviation", ".4g"),
    ),
    error_rows,
)
COMPARISON = Sheet(
    "comparison",
    "Exact margins: branch and bound against a mixed-integer program",
    (
        Column("method", "trained by"),
        Column("solved", "solved exactly", "d"),
        Column("by_search", "by our search", "d"),
        Column("open", "not in time", "d"),
        Column("compared", "compared with MILP", "d"),
        Column("largest", "largest difference", ".2e"),
        Column("contradictions", "contradictions", "d"),
    ),
    comparison_rows,
)
EXPERIMENT = Experiment(
    name="precision",
    claim="TAPS estimates the worst case far more precisely than IBP, PGD and SABR, and its "
    "networks are the more robust for it.",
    where="Figures 1, 5, 9; Section 4.2",
    paper_minutes=500,
    plans=plans,
    tables=(ACCURACIES, ERRORS, COMPARISON),
    claims=claims,
    draw=draw,
    problems=problems,
)
