"""What CONTRIBUTING says about adding things is all it takes: each is added to a table here.

The package is as it was afterwards: tables are patched, no file is touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightrope as tr
from tightrope import data
from tightrope.answer import Verdict
from tightrope.box import Box
from tightrope.certification.complete import bound_nodes
from tightrope.certification.problem import OpenProblem, robustness
from tightrope.certification.properties import Ball
from tightrope.certification.search import branching
from tightrope.certification.search.branch_and_bound import BranchAndBound, SearchSettings
from tightrope.certification.subjects import Subject
from tightrope.data import catalog
from tightrope.domains import interval, zonotope
from tightrope.domains.linear import magnitudes
from tightrope.domains.linear import rules as linear
from tightrope.domains.milp import encoding, expressions
from tightrope.domains.reduced.reduction import reduce
from tightrope.domains.reduced.splits import Bounder, Subproblems, View
from tightrope.errors import UserError
from tightrope.graph import Graph, evaluate, ops, rounding, trace
from tightrope.graph.trace import converters
from tightrope.graph.values import apply
from tightrope.precision import ROUNDING
from tightrope.study.columns import NATURAL
from tightrope.study.experiment import Column, Experiment, Picture, Row, Sheet
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.measured import Measurements
from tightrope.study.plans import Plan
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import METHODS, Loss, Objective
from tightrope.training.parsing import number, setting

pytestmark = pytest.mark.usefixtures("one_thread")


# --- an operation -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Absolute(ops.Op):
    """`|x|`: nothing but intervals know it."""


@dataclass(frozen=True, eq=False)
class Flip(ops.Op):
    """The features in reverse order: an affine operation with rules of its own."""


class Toy(nn.Module):
    """A network with both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.last(torch.relu(self.first(x) + torch.flip(torch.abs(self.first(x)), (1,))))


def absolute_box(op: ops.Op, box: Box, *, rounding: float) -> Box:
    lower, upper = box.corners
    least = torch.maximum(lower, -upper).clamp(min=0)
    return Box(least, torch.maximum(-lower, upper))


def turned_box(op: ops.Op, box: Box, *, rounding: float) -> Box:
    return box.map(lambda t: t.flip(1))


def turned_coefficients(op: ops.Op, a: Any, i: int, state: Any) -> tuple[Any, ...]:
    dense = a.dense()
    return (dense.like(dense.values.flip(1)),)


def turned_zonotope(op: ops.Op, z: Any, *, errors: Any) -> Any:
    groups = {name: group.through(lambda t: t.flip(1)) for name, group in z.groups.items()}
    return zonotope.Zonotope(z.center.flip(1), groups)


RULES: dict[str, tuple[dict[type[ops.Op], Any], Any, Any]] = {
    "points": (
        evaluate.TABLE,
        evaluate.Row(
            lambda op, x: x.abs(),
            lambda rule, op, x: rounding.Rounded(rule(op, x.value), x.error),
        ),
        evaluate.Row(lambda op, x: x.flip(1), rounding.rearranged),
    ),
    "interval": (interval.RULES, absolute_box, turned_box),
    "zonotope": (zonotope.RULES, zonotope.by_intervals, turned_zonotope),
    "linear": (linear.RULES, linear.by_intervals, turned_coefficients),
    "magnitudes": (magnitudes.RULES, lambda op, x: x, lambda op, x: x.flip(1)),
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """A traced network of both operations."""
    aten = torch.ops.aten
    monkeypatch.setitem(converters.CONVERTERS, aten.abs, lambda x: apply(x, Absolute()))
    monkeypatch.setitem(converters.CONVERTERS, aten.flip, lambda x, dims: apply(x, Flip()))
    for table, absolute, turned in RULES.values():
        monkeypatch.setitem(table, Absolute, absolute)
        monkeypatch.setitem(table, Flip, turned)
    torch.manual_seed(0)
    return trace(Toy().double(), (3,)).detach()


def test_an_operation_is_traced(toy: Graph) -> None:
    assert {Absolute, Flip} <= {type(node.op) for node in toy.nodes}


@pytest.mark.parametrize("eps", [0.01, 0.3])
@pytest.mark.parametrize("method", ["ibp", "zonotope", "crown-ibp", "crown", "alpha"])
def test_bounds_of_an_operation_are_sound(toy: Graph, method: str, eps: float) -> None:
    x = torch.rand(4, 3, dtype=torch.float64)
    found = tr.bounds(toy, x, eps=eps, domain=None, method=method)
    noise = torch.rand(500, 4, 3, dtype=torch.float64) * 2 - 1
    noise = torch.where(torch.rand_like(noise) < 0.3, noise.sign(), noise)
    outputs = toy((x + eps * noise).flatten(0, 1)).unflatten(0, (500, 4))
    slack = 1e-9  # of zonotopes, which never give a verdict
    assert bool(((outputs >= found.lower - slack) & (outputs <= found.upper + slack)).all())
    wide = tr.bounds(toy, x, eps=eps, domain=None, method="ibp")
    assert bool((found.lower >= wide.lower - slack).all())
    assert bool((found.upper - found.lower < 30 * eps).all())  # they say something


def test_an_operation_is_verified(toy: Graph) -> None:
    x = torch.rand(3, dtype=torch.float64)
    label = int(toy(x[None]).argmax())
    assert tr.verify(toy, x, label, eps=1e-6).verdict == Verdict.VERIFIED
    assert tr.verify(toy, x, 1 - label if label < 2 else 0, eps=0.01).verdict == Verdict.FALSIFIED


def test_programs_say_by_name_what_they_cannot_encode(
    toy: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr(
        encoding, "NOT_PIECEWISE_LINEAR", (*expressions.NOT_PIECEWISE_LINEAR, Absolute)
    )
    box = Box(torch.zeros(1, 3), torch.ones(1, 3))
    _, boxes = interval.bounds(
        toy, box.map(Tensor.double), keep=range(len(toy.nodes)), rounding=ROUNDING
    )
    with pytest.raises(UserError, match="is a Absolute, which is not piecewise linear"):
        encoding.Encoding(toy, box, boxes)


# --- a data set ---------------------------------------------------------------------------------


def stripes(data_dir: Path) -> data.Dataset:
    """Images of two kinds: bright on the left, or on the right."""
    y = torch.arange(80) % 2
    x = torch.full((80, 1, 4, 4), 20, dtype=torch.uint8)
    x[y == 0, :, :, :2], x[y == 1, :, :, 2:] = 230, 230
    return data.Dataset("stripes", x, y, x[:20], y[:20], ("left", "right"), (0.5,), (0.25,))


@pytest.fixture
def new_data(monkeypatch: pytest.MonkeyPatch) -> None:
    row = catalog.Row((1, 4, 4), 2, stripes, lambda where: where, source=None, normalize=True)
    monkeypatch.setitem(catalog.DATASETS, "stripes", row)


def test_a_data_set_is_a_row(new_data: None, tmp_path: Path) -> None:
    assert "stripes" in data.dataset_names()
    assert data.load_dataset("stripes").input_shape == (1, 4, 4)
    described = {entry.name: entry for entry in data.describe(tmp_path)}
    assert described["stripes"].available and described["stripes"].classes == 2
    with pytest.raises(UserError, match="stripes comes with Tightrope"):
        data.fetch("stripes", tmp_path)


# --- a training method ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Smoothed(Objective):
    """Cross-entropy of smoothed labels."""

    name: ClassVar[str] = "smoothed"
    summary: ClassVar[str] = "cross-entropy of smoothed labels"

    share: float = setting(0.1, number(minimum=0.0, maximum=1.0), "of the labels that is spread")

    def __call__(self, model: FixedModel, x: Tensor, y: Tensor, radius: float) -> Loss:
        """Return the loss of the clean outputs."""
        return Loss(F.cross_entropy(model.logits, y, label_smoothing=self.share))


SMALL = {
    **{"net": "mlp", "width": 4, "depth": 1, "batch_norm": False, "epochs": 3, "eps": 0.01},
    **{"validation": 0, "select": "last", "batch_size": 10, "learning_rate": 0.02},
}


def test_a_method_is_a_class_in_a_table(
    new_data: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "smoothed", Smoothed)
    options: dict[str, Any] = {**SMALL, "smoothed.share": 0.2}
    run = tr.train(data="stripes", method="smoothed", out=tmp_path / "a", **options)
    settings = run.settings()
    assert settings.method == "smoothed" and settings.normalize
    assert "share = 0.2" in (tmp_path / "a" / "config.toml").read_text()
    result = tr.certify(run, samples=20)
    assert result.natural == 1.0 and result.certified == 1.0
    with pytest.raises(UserError, match=r"smoothed\.share"):
        tr.train(
            data="stripes",
            method="smoothed",
            out=tmp_path / "b",
            **{**options, "smoothed.share": 2},
        )


# --- an experiment --------------------------------------------------------------------------------


def test_an_experiment_is_a_declaration(
    new_data: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        Row({"method": m}, (Plan(f"toy-{m}", "demo", {**SMALL, "data": "stripes", "method": m}),))
        for m in ("standard", "ibp")
    ]
    columns = (Column("method", "method"), NATURAL)
    experiment = Experiment(
        name="toy",
        claim="Both learn.",
        where="nowhere",
        paper_minutes=1,
        plans=lambda scale: [plan for row in rows for plan in row.plans],
        tables=(Sheet("toy", "Both methods, %", columns, lambda runs: rows),),
        claims=lambda runs, tables: [
            runs.judge(
                f"{row.known['method']} learns.",
                "nowhere",
                row.names,
                lambda run: (run.natural == 100, f"{run.natural:.0f} %"),
            )
            for row in rows
        ],
        draw=lambda runs, tables: [Picture("toy", lambda plt: drawn(plt, tables[0].rows))],
    )
    monkeypatch.setitem(EXPERIMENTS, "toy", experiment)
    for row in rows:
        make_run(tmp_path / "runs" / row.names[0])
    monkeypatch.setattr("tightrope.study.reproducing.unfinished", lambda plan, folder: False)
    monkeypatch.setattr("tightrope.study.reproducing.carry_out_all", nothing_to_do)
    result = tr.reproduce("toy", out=tmp_path)
    assert [row["natural"] for row in result.tables[0].rows] == [100.0, 100.0]
    assert {claim.verdict for claim in result.claims} == {"holds"}
    assert result.figures == ("toy.svg", "toy.png")
    assert "standard learns." in (tmp_path / "toy" / "claims.md").read_text()


def make_run(folder: Path) -> None:
    """Train and certify a little network there."""
    run = tr.train(data="stripes", method="standard", out=folder, **SMALL)
    tr.certify(run, samples=20)


def nothing_to_do(*args: Any, **options: Any) -> Any:
    return type("Session", (), {"failures": {}, "seconds": {}})()


def drawn(plt: Any, rows: Any) -> Any:
    figure, axes = plt.subplots()
    axes.bar([row["method"] for row in rows], [row["natural"] for row in rows])
    return figure


def test_an_experiment_without_runs_claims_nothing(tmp_path: Path) -> None:
    columns = (Column("method", "method"), NATURAL)
    row = Row({"method": "ibp"}, (Plan("toy-ibp", "demo"),))
    sheet = Sheet("toy", "A method", columns, lambda runs: [row])
    table = sheet.filled(Measurements(tmp_path))
    assert table.rows == ({"method": "ibp", "natural": None},)


# --- a branching rule -----------------------------------------------------------------------------


def test_a_branching_rule_is_a_function_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def first_open(
        bounder: Bounder, problems: Subproblems, view: View, levels: int, candidates: int
    ) -> Tensor:
        calls.append(len(problems))
        free = ((problems.sign == 0) & bounder.bends).float()
        return free.topk(levels, 1).indices

    monkeypatch.setitem(branching.RULES, "first", first_open)
    torch.manual_seed(1)
    hidden = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
    subject = Subject.of(nn.Sequential(*hidden, nn.Linear(16, 3)), (4,))
    x = torch.rand(1, 4)
    label = subject.exact(x.double()).argmax(1)
    answers = {}
    for rule in ("first", "intercept"):
        for eps in (Fraction(k, 10) for k in range(4, 8)):
            (problem,) = robustness(subject, Ball(x, eps, None), label)
            relaxation = bound_nodes(subject, OpenProblem(problem))
            network = reduce(relaxation, problem.unsafe.matrix, problem.unsafe.offset)
            search = BranchAndBound(
                network,
                problem.unsafe.group,
                problem.refuter(subject),
                settings=SearchSettings(branching=rule),
            )
            answers[rule, eps] = bool(search.run(math.inf).verdict == Verdict.VERIFIED)
    assert calls
    assert [v for (rule, _), v in answers.items() if rule == "first"] == [
        v for (rule, _), v in answers.items() if rule == "intercept"
    ]
    assert set(answers.values()) == {True, False}
