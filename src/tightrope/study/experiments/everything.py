"""`proxy` and `cost`: what all runs there are have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tightrope.study import published
from tightrope.study.columns import ADVERSARIAL, CERTIFIED, TAPS
from tightrope.study.experiment import (
    Claim,
    Column,
    Experiment,
    Picture,
    Sheet,
    Table,
    Value,
    Verdict,
)
from tightrope.study.measured import Damaged, Measured, Measurements, Missing
from tightrope.study.pictures import label
from tightrope.training.objectives import METHODS

FEWEST = 3  # runs that a correlation makes sense of


def collected(runs: Measurements, read: Callable[[Measured], Any]) -> tuple[list[Any], list[str]]:
    """Read all runs that have what it takes; the second list says which are damaged."""
    found, problems = [], []
    for run in runs:
        try:
            found.append(read(run))
        except Damaged as damage:
            problems.append(f"{run.name}: {damage}")
        except Missing:
            continue
    return found, problems


# --- proxy --------------------------------------------------------------------------------------


class Accuracies(NamedTuple):
    """What is compared of one run, on the same samples; `bounded`: it was trained with bounds."""

    data: str
    bounded: bool
    run: str
    taps: float
    adversarial: float
    certified: float

    @property
    def three(self) -> tuple[float, float, float]:
        """TAPS, adversarial and certified accuracy."""
        return self.taps, self.adversarial, self.certified


def by_data(runs: Measurements) -> dict[str, list[Accuracies]]:
    """Return the accuracies of all runs by data set."""
    found: dict[str, list[Accuracies]] = {}
    for accuracies in collected(runs, _accuracies)[0]:
        found.setdefault(accuracies.data, []).append(accuracies)
    return found


def proxy_rows(runs: Measurements) -> Iterator[Mapping[str, Value]]:
    """Compare TAPS accuracy with adversarial and certified accuracy."""
    found = by_data(runs)
    for data in sorted({*found, "mnist"}):
        every = found.get(data, [])
        some = [accuracies for accuracies in every if accuracies.bounded]
        yield _proxy_row(data, "", every)
        # Latent boxes say nothing about networks that were trained without bounds.
        if len(some) < len(every):
            yield _proxy_row(data, ", trained with bounds", some)


def run_rows(runs: Measurements) -> Iterator[Mapping[str, Value]]:
    """List the runs that are compared."""
    names = ("run", "taps", "adversarial", "certified")
    for many in by_data(runs).values():
        for accuracies in many:
            yield {name: getattr(accuracies, name) for name in names}


def _accuracies(run: Measured) -> Accuracies:
    settings = run.settings
    if run.estimates["settings"].get("eps") != run.certification["settings"].get("eps"):
        raise Missing("measured at different radii")
    if len(run.margins("taps")) < run.samples:
        raise Missing("fewer samples estimated than certified")
    bounded = METHODS[settings.method].propagates_boxes
    taps = run.accuracy("taps", run.samples)
    return Accuracies(settings.data, bounded, run.name, taps, run.adversarial, run.certified)


def _proxy_row(data: str, which: str, found: Sequence[Accuracies]) -> dict[str, Value]:
    row: dict[str, Value] = {"data": data + which, "runs": len(found)}
    if data in published.PROXY:
        certified, adversarial, to_certified, to_adversarial = published.PROXY[data]
        row["paper"] = (
            f"{certified}, {adversarial}; {to_certified[0]} ± {to_certified[1]}, "
            f"{to_adversarial[0]} ± {to_adversarial[1]}"
        )
    if len(found) < FEWEST:
        return row
    taps, adversarial_values, certified_values = np.array([one.three for one in found]).T
    for name, other in (("adversarial", adversarial_values), ("certified", certified_values)):
        if taps.std() and other.std():
            row[name] = float(np.corrcoef(taps, other)[0, 1])
        row[f"to_{name}"] = float((taps - other).mean())
        row[f"to_{name}_deviation"] = float((taps - other).std())
    return row


def proxy_claims(runs: Measurements, tables: Sequence[Table]) -> Iterator[Claim]:
    """Judge every row of the table."""
    for row in tables[0].rows:
        yield from _proxy_claims(row)


def _proxy_claims(row: Mapping[str, Value]) -> list[Claim]:
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
    text: str, row: Mapping[str, Value], names: tuple[str, ...], test: Any, evidence: str
) -> Claim:
    values = [row.get(name) for name in names]
    if any(value is None for value in values):
        reason = f"{row['runs']} runs here have all three accuracies; make others first"
        return Claim(text, "Table 10", Verdict.UNTESTED, reason)
    verdict = Verdict.HOLDS if test(values) else Verdict.FAILS
    return Claim(text, "Table 10", verdict, evidence.format(*values) + f" ({row['runs']} runs)")


def draw_proxy(runs: Measurements, tables: Sequence[Table]) -> Iterator[Picture]:
    """Draw certified and adversarial accuracy over TAPS accuracy."""
    found = by_data(runs)
    if found:
        yield Picture("proxy", lambda plt: _draw_proxy(plt, found))


def _draw_proxy(plt: Any, found: Mapping[str, Any]) -> Any:
    figure, axes = plt.subplots(figsize=(5, 4.4))
    for i, (data, many) in enumerate(found.items()):
        taps, adversarial, certified = np.array([one.three for one in many]).T
        axes.plot(taps, certified, "o", color=f"C{2 * i}", label=f"{data}: certified")
        axes.plot(taps, adversarial, "^", color=f"C{2 * i + 1}", label=f"{data}: adversarial")
    axes.axline((90, 90), slope=1, color="black", linewidth=0.8)
    axes.set(xlabel="TAPS accuracy, %", ylabel="certified or adversarial accuracy, %")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure


# --- cost ---------------------------------------------------------------------------------------


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


def cost_claims(runs: Measurements, tables: Sequence[Table]) -> list[Claim]:
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
    paper_minutes=1,
    plans=lambda scale: (),
    tables=(
        Sheet(
            "proxy",
            "TAPS accuracy as a proxy (differences in points)",
            (
                Column("data", "data"),
                Column("runs", "runs", "d"),
                Column("certified", "cor(TAPS, cert.)", ".4f"),
                Column("adversarial", "cor(TAPS, adv.)", ".4f"),
                Column("to_certified", "TAPS - cert.: mean"),
                Column("to_certified_deviation", "deviation"),
                Column("to_adversarial", "TAPS - adv.: mean"),
                Column("to_adversarial_deviation", "deviation"),
                Column("paper", "paper"),
            ),
            proxy_rows,
        ),
        Sheet(
            "runs", "The runs, %", (Column("run", "run"), TAPS, ADVERSARIAL, CERTIFIED), run_rows
        ),
    ),
    claims=proxy_claims,
    draw=draw_proxy,
    problems=lambda runs: collected(runs, _accuracies)[1],
)
COST = Experiment(
    name="cost",
    claim="TAPS costs several times IBP to train, and its networks take longer to certify.",
    where="Tables 2, 7, 9; Appendix B",
    paper_minutes=1,
    plans=lambda scale: (),
    tables=(
        Sheet(
            "cost",
            "Seconds of training and certification (the paper: one GPU, the full test set)",
            (
                Column("run", "run"),
                Column("method", "method"),
                Column("training", "training, s", ".0f"),
                Column("epoch", "per epoch, s"),
                Column("certifying", "certifying, s", ".0f"),
                Column("sample", "per sample, s", ".3g"),
                Column("paper_training", "paper: training, s", "d"),
                Column("paper_certifying", "certifying, s", "d"),
            ),
            lambda runs: collected(runs, _cost_row)[0],
        ),
    ),
    claims=cost_claims,
    problems=lambda runs: collected(runs, _cost_row)[1],
)
