"""`proxy` and `cost`: what all runs there are have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tightrope.study import published
from tightrope.study.experiment import (
    Claim,
    Column,
    Experiment,
    Findings,
    Picture,
    Table,
    Value,
    Verdict,
)
from tightrope.study.measured import Damaged, Measured, Measurements, Missing
from tightrope.study.pictures import label
from tightrope.study.plans import Plan
from tightrope.training.objectives import METHODS

FEWEST = 3  # runs that a correlation makes sense of


def no_plans(scale: str) -> Sequence[Plan]:
    """These experiments make no runs: they look at what others made."""
    return ()


# --- proxy --------------------------------------------------------------------------------------


def analyse_proxy(runs: Measurements) -> Findings:
    """Compare TAPS accuracy with adversarial and certified accuracy, on the same samples."""
    found: dict[str, list[tuple[str, float, float, float]]] = {}
    bounded: dict[str, list[tuple[str, float, float, float]]] = {}
    problems = []
    for run in runs:
        try:
            data, row = run.settings.data, _accuracies(run)
        except Damaged as damage:
            problems.append(f"{run.name}: {damage}")
            continue
        except Missing:
            continue
        found.setdefault(data, []).append(row)
        if METHODS[run.settings.method].propagates_boxes:
            bounded.setdefault(data, []).append(row)
    columns = (
        Column("data", "data"),
        Column("runs", "runs", "d"),
        Column("certified", "cor(TAPS, cert.)", ".4f"),
        Column("adversarial", "cor(TAPS, adv.)", ".4f"),
        Column("to_certified", "TAPS - cert.: mean"),
        Column("to_certified_deviation", "deviation"),
        Column("to_adversarial", "TAPS - adv.: mean"),
        Column("to_adversarial_deviation", "deviation"),
        Column("paper", "paper"),
    )
    rows = []
    for data in sorted({*found, "mnist"}):
        some, every = bounded.get(data, []), found.get(data, [])
        rows.append(_proxy_row(data, "", every))
        # Latent boxes say nothing about networks that were trained without bounds.
        if len(some) < len(every):
            rows.append(_proxy_row(data, ", trained with bounds", some))
    each = Table(
        "runs",
        "The runs, %",
        (
            Column("run", "run"),
            Column("taps", "TAPS accuracy"),
            Column("adversarial", "adversarial"),
            Column("certified", "certified"),
        ),
        tuple(
            {"run": name, "taps": t, "adversarial": a, "certified": c}
            for many in found.values()
            for name, t, a, c in many
        ),
    )
    title = "TAPS accuracy as a proxy (differences in points)"
    tables = (Table("proxy", title, columns, tuple(rows)), each)
    claims = [claim for row in rows for claim in _proxy_claims(row)]
    pictures = (Picture("proxy", lambda plt: _draw_proxy(plt, found)),) if found else ()
    return Findings(tables, tuple(claims), pictures, tuple(problems))


def _accuracies(run: Measured) -> tuple[str, float, float, float]:
    if run.estimates["settings"].get("eps") != run.certification["settings"].get("eps"):
        raise Missing("measured at different radii")
    if len(run.margins("taps")) < run.samples:
        raise Missing("fewer samples estimated than certified")
    return run.name, run.accuracy("taps", run.samples), run.adversarial, run.certified


def _proxy_row(
    data: str, which: str, found: list[tuple[str, float, float, float]]
) -> dict[str, Value]:
    row: dict[str, Value] = {"data": data + which, "runs": len(found)}
    if data in published.PROXY:
        certified, adversarial, to_certified, to_adversarial = published.PROXY[data]
        row["paper"] = (
            f"{certified}, {adversarial}; {to_certified[0]} ± {to_certified[1]}, "
            f"{to_adversarial[0]} ± {to_adversarial[1]}"
        )
    if len(found) < FEWEST:
        return row
    taps, adversarial_values, certified_values = np.array([values for _, *values in found]).T
    for name, other in (("adversarial", adversarial_values), ("certified", certified_values)):
        if taps.std() and other.std():
            row[name] = float(np.corrcoef(taps, other)[0, 1])
        row[f"to_{name}"] = float((taps - other).mean())
        row[f"to_{name}_deviation"] = float((taps - other).std())
    return row


def _proxy_claims(row: dict[str, Value]) -> list[Claim]:
    return [
        _number_claim(
            f"{row['data']}: TAPS accuracy is highly correlated (at least 0.9) with adversarial "
            "and with certified accuracy.",
            row,
            ("certified", "adversarial"),
            lambda values: min(values) >= 0.9,
            "correlation with certified {:.4f}, with adversarial accuracy {:.4f}",
        ),
        _number_claim(
            f"{row['data']}: TAPS accuracy differs little from both: by less than 2 points on "
            "average.",
            row,
            ("to_certified", "to_adversarial"),
            lambda values: max(map(abs, values)) < 2.0,
            "TAPS less certified {:+.2f}, less adversarial {:+.2f} points",
        ),
    ]


def _number_claim(
    text: str, row: dict[str, Value], names: tuple[str, ...], test: Any, evidence: str
) -> Claim:
    values = [row.get(name) for name in names]
    if any(value is None for value in values):
        reason = f"{row['runs']} runs here have all three accuracies; make others first"
        return Claim(text, "Table 10", Verdict.UNTESTED, reason)
    verdict = Verdict.HOLDS if test(values) else Verdict.FAILS
    return Claim(text, "Table 10", verdict, evidence.format(*values) + f" ({row['runs']} runs)")


def _draw_proxy(plt: Any, found: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(figsize=(5, 4.4))
    for i, (data, many) in enumerate(found.items()):
        taps, adversarial, certified = np.array([values for _, *values in many]).T
        axes.plot(taps, certified, "o", color=f"C{2 * i}", label=f"{data}: certified")
        axes.plot(taps, adversarial, "^", color=f"C{2 * i + 1}", label=f"{data}: adversarial")
    axes.axline((90, 90), slope=1, color="black", linewidth=0.8)
    axes.set(xlabel="TAPS accuracy, %", ylabel="certified or adversarial accuracy, %")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


# --- cost ---------------------------------------------------------------------------------------


def analyse_cost(runs: Measurements) -> Findings:
    """List the seconds of all runs."""
    columns = (
        Column("run", "run"),
        Column("method", "method"),
        Column("training", "training, s", ".0f"),
        Column("epoch", "per epoch, s"),
        Column("certifying", "certifying, s", ".0f"),
        Column("sample", "per sample, s", ".3g"),
        Column("paper_training", "paper: training, s", "d"),
        Column("paper_certifying", "certifying, s", "d"),
    )
    rows = []
    problems = []
    for run in runs:
        try:
            rows.append(_cost_row(run))
        except Damaged as damage:
            problems.append(f"{run.name}: {damage}")
        except Missing:
            continue
    title = "Seconds of training and certification (the paper: one GPU, the full test set)"
    table = Table("cost", title, columns, tuple(rows))
    return Findings((table,), tuple(_cost_claims(runs)), problems=tuple(problems))


def _cost_row(run: Measured) -> dict[str, Value]:
    training, certifying = published.COST.get(run.name, (None, None))
    row: dict[str, Value] = {
        "run": run.name,
        "method": label(run.settings.method),
        "training": run.training_seconds,
        "epoch": run.training_seconds / len(run.history),
        "paper_training": training,
        "paper_certifying": certifying,
    }
    try:
        row |= {
            "certifying": float(run.certification["seconds"]),
            "sample": run.certify_seconds,
        }
    except Damaged:
        raise
    except Missing:
        pass  # not certified yet
    return row


def _cost_claims(runs: Measurements) -> list[Claim]:
    """Compare methods within each group of runs that differ in the method only."""
    claims = []
    for name in [run.name for run in runs if run.name.endswith("-taps")]:
        group = name.removesuffix("taps")
        names = {m: f"{group}{m}" for m in ("ibp", "sabr", "staps")}
        claims.append(
            runs.judge(
                f"{group.rstrip('-')}: training by TAPS is notably more expensive than by IBP.",
                "Limitations",
                [names["ibp"], name],
                lambda ibp, taps: _times(taps, ibp, "training_seconds", "training", 2.0),
            )
        )
        claims.append(
            runs.judge(
                f"{group.rstrip('-')}: networks trained by TAPS take longer to certify than those "
                "trained by IBP.",
                "Table 2",
                [names["ibp"], name],
                lambda ibp, taps: _times(taps, ibp, "certify_seconds", "certifying", 1.0),
            )
        )
    if not claims:
        text = "Training by TAPS is notably more expensive than by IBP."
        claims.append(Claim(text, "Limitations", Verdict.UNTESTED, "there is no TAPS run here"))
    return claims


def _times(a: Measured, b: Measured, what: str, word: str, least: float) -> tuple[bool, str]:
    ratio = getattr(a, what) / max(getattr(b, what), 1e-9)
    return ratio > least, f"{word} takes {ratio:.2f} times as long"


PROXY = Experiment(
    name="proxy",
    claim="TAPS accuracy tells adversarial and certified accuracy without certifying.",
    where="Table 10; Appendix C",
    plans=no_plans,
    analyse=analyse_proxy,
    paper_minutes=1,
)
COST = Experiment(
    name="cost",
    claim="TAPS costs several times IBP to train, and its networks take longer to certify.",
    where="Tables 2, 7, 9; Appendix B",
    plans=no_plans,
    analyse=analyse_cost,
    paper_minutes=1,
)
