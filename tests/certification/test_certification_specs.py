"""Specs: what must hold of outputs, exactly, in any nesting."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tightrope as tr
from tightrope.errors import UserError
from tightrope.limits import SPEC_ROWS

OUTPUTS = 4
Truth = Callable[[list[Fraction]], bool]


def random_spec(source: random.Random, depth: int) -> tuple[tr.Spec, Truth]:
    """Return a spec and what it means, written down independently, in fractions."""
    kind = source.choice(["argmax", "within", "linear"] + ["and", "or"] * depth)
    if kind == "argmax":
        label = source.randrange(OUTPUTS)
        among = source.choice([None, source.sample(range(OUTPUTS), 3)])
        others = [i for i in (range(OUTPUTS) if among is None else among) if i != label]
        return tr.argmax(label, among), lambda o: all(o[label] > o[i] for i in others)
    if kind == "within":
        low = [source.choice([-1.0, 0.0, 0.5, -float("inf")]) for _ in range(OUTPUTS - 1)] + [-2.0]
        high = source.choice([None, 1.0])

        def inside(o: list[Fraction]) -> bool:
            below = all(value <= 1 for value in o) or high is None
            return below and all(v >= end for v, end in zip(o, low, strict=True))

        return tr.within(torch.tensor(low), high), inside
    if kind == "linear":
        rows = [[source.choice([-1.0, 0.0, 0.1, 2.0]) for _ in range(OUTPUTS)] for _ in range(2)]
        ends = [source.choice([-0.5, 0.0, 0.25]) for _ in rows]

        def positive(o: list[Fraction]) -> bool:
            return all(
                sum(Fraction(f) * v for f, v in zip(row, o, strict=True)) + Fraction(end) > 0
                for row, end in zip(rows, ends, strict=True)
            )

        return tr.linear(rows, ends), positive
    parts = [random_spec(source, depth - 1) for _ in range(2)]
    (first, one), (second, other) = parts
    if kind == "and":
        return first & second, lambda o: one(o) and other(o)
    return first | second, lambda o: one(o) or other(o)


@pytest.mark.parametrize("seed", range(150))
def test_a_spec_means_what_it_says(seed: int) -> None:
    """Outputs on a coarse grid meet every condition exactly at its limit, too."""
    source = random.Random(seed)
    spec, truth = random_spec(source, 2)
    failure = spec.failure(OUTPUTS)
    unsafe = failure.unsafe(torch.device("cpu"))
    groups = unsafe.group.unique()
    for _ in range(40):
        values = [source.choice([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0]) for _ in range(OUTPUTS)]
        outputs = torch.tensor(values, dtype=torch.float64)
        holds = truth([Fraction(value) for value in values])
        assert failure.holds_at(outputs) is not holds
        # What proofs are about: where the spec fails, all rows of some group are at most zero.
        rows = unsafe.matrix @ outputs + unsafe.offset
        forbidden = any(bool((rows[unsafe.group == g] <= 1e-12).all()) for g in groups)
        assert holds or forbidden


def test_sums_that_floats_get_wrong() -> None:
    spec = tr.linear([1.0, 1.0, -1.0])
    tiny, large = 2.0**-60, 1.0
    for last, holds in ((tiny, True), (0.0, False), (-tiny, False)):
        # The sum of floats is 1 + last - 1, rounded to zero.
        outputs = torch.tensor([large, last, large], dtype=torch.float64)
        assert spec.failure(3).holds_at(outputs) is not holds
    few = tr.linear([5e-324, -5e-324])
    assert few.failure(2).holds_at(torch.tensor([0.25, 0.5], dtype=torch.float64))
    assert not few.failure(2).holds_at(torch.tensor([0.5, 0.25], dtype=torch.float64))
    huge = tr.linear([1e308, 1e308, -1e308])
    assert not huge.failure(3).holds_at(torch.tensor([2.0, 2.0, 3.0], dtype=torch.float64))


def test_no_answer_fails() -> None:
    assert tr.within(-1.0).failure(2).holds_at(torch.tensor([0.0, float("nan")]))
    assert tr.within(-1.0).failure(2).holds_at(torch.tensor([0.0, float("inf")]))


# --- verdicts -------------------------------------------------------------------------------------


def network(seed: int, sizes: tuple[int, ...] = (3, 6, OUTPUTS)) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(sizes):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("seed", range(24))
def test_verdicts_agree_with_points(seed: int) -> None:
    source = random.Random(seed)
    spec, truth = random_spec(source, 2)
    net = network(seed)
    lower = torch.rand(3)
    upper = lower + torch.rand(3) * source.choice([0.0, 0.01, 0.3, 1.0])
    found = tr.verify(net, box=(lower, upper), spec=spec, timeout=20)

    def holds(x: Tensor) -> bool:
        return truth([Fraction(v) for v in net(x[None])[0].double().tolist()])

    assert found.verdict != "unknown" or found.reason
    if found.verdict == "falsified":
        point = found.counterexample
        assert point is not None and bool(((point >= lower) & (point <= upper)).all())
        assert not holds(point)
    if found.verdict == "verified":
        corners = [torch.where(torch.tensor(s) > 0, lower, upper) for s in np.ndindex(2, 2, 2)]
        points = [lower + (upper - lower) * torch.rand(3) for _ in range(100)]
        assert all(holds(torch.clamp(x, lower, upper)) for x in (*corners, *points))


@pytest.mark.parametrize("seed", range(12))
def test_ranges_of_an_affine_network_are_exact(seed: int) -> None:
    """Its largest output is known; a range that ends just above holds, just below it fails."""
    torch.manual_seed(seed)
    net = nn.Linear(5, 2, dtype=torch.float64)
    lower = torch.rand(5, dtype=torch.float64)
    upper = lower + 0.1
    ends = [[Fraction(v) for v in t.tolist()] for t in (lower, upper)]
    bests = []
    for row, bias in zip(net.weight.tolist(), net.bias.tolist(), strict=True):
        picked = (max(Fraction(w) * e[i] for e in ends) for i, w in enumerate(row))
        bests.append(sum(picked, Fraction(bias)))
    top = float(max(bests))
    box = tr.Box(lower, upper)
    assert tr.verify(net, box=box, spec=tr.within(None, top + 1e-9)).verdict == "verified"
    below = tr.verify(net, box=box, spec=tr.within(None, top - 1e-9))
    assert below.verdict == "falsified" and below.counterexample is not None
    assert float(net(below.counterexample[None]).detach().max()) > top - 1e-9


def test_a_range_may_end_where_outputs_do() -> None:
    net = nn.Sequential(network(0), nn.ReLU())
    box = (torch.full((3,), -1.0), torch.ones(3))
    assert tr.verify(net, box=box, spec=tr.within(0)).verdict == "verified"
    strictly = tr.linear(torch.eye(OUTPUTS))
    assert tr.verify(net, box=box, spec=strictly).verdict == "falsified"
    assert tr.verify(net, box=box, spec=strictly & tr.within(0)).verdict == "falsified"
    assert tr.verify(net, box=box, spec=tr.within(0, 1e-3)).verdict == "falsified"


def test_a_label_is_an_argmax_of_any_box() -> None:
    net, x = network(3), torch.full((3,), 0.5)
    label = int(net(x[None]).argmax())
    corners = (x - 0.01, x + 0.01)
    for options in ({"label": label}, {"spec": tr.argmax(label)}):
        assert tr.verify(net, box=corners, **options).verdict == "verified"
        assert tr.verify(net, x, eps=0.01, **options).verdict == "verified"
    other = (label + 1) % OUTPUTS
    found = tr.verify(net, x, eps=0.01, spec=tr.argmax(other))
    assert found.verdict == "falsified" and found.stage == "natural"
    rivals = [i for i in range(OUTPUTS) if i != label]
    assert (
        tr.verify(net, x, eps=0.01, spec=tr.argmax(label, among=rivals[:1])).verdict == "verified"
    )


def test_radii_by_feature() -> None:
    """Only the second input matters, and only the first one moves."""
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))
    x = torch.tensor([0.5, 0.25])
    assert tr.verify(net, x, 0, eps=torch.tensor([0.5, 0.0])).verdict == "verified"
    assert tr.verify(net, x, 0, eps=torch.tensor([0.0, 0.2])).verdict == "verified"
    found = tr.verify(net, x, 0, eps=torch.tensor([0.0, 0.75]), domain=None)
    assert found.verdict == "falsified" and found.counterexample is not None
    assert (
        float(found.counterexample[0]) == 0.5 and abs(float(found.counterexample[1]) - 0.25) <= 0.75
    )
    bounds = tr.bounds(net, x[None], eps=torch.tensor([0.5, 0.125]))
    assert float(bounds.lower[0, 0]) <= 0.125 and float(bounds.lower[0, 0]) > 0.1249


def test_a_box_between_two_floats() -> None:
    """Bounds that no float32 lies between mean the nearest one; both verdicts cannot be."""
    net = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    thin = torch.tensor([0.1], dtype=torch.float64)
    found = tr.verify(net, box=(thin, thin), label=0)
    assert found.verdict == "verified" and "1 input was fixed at the nearest float32" in found.note
    found = tr.verify(net, box=(thin, thin), label=1)
    assert found.verdict == "falsified" and found.counterexample is not None
    assert found.counterexample.dtype == torch.float32
    assert float(found.counterexample[0]) == float(torch.tensor(0.1))


def test_outputs_that_are_a_picture() -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(1, 1, 3, padding=1)
    box = (torch.zeros(1, 4, 4), torch.full((1, 4, 4), 0.1))
    bounds = tr.bounds(net, tr.Box(*(t[None] for t in box)))
    wide = tr.within(bounds.lower[0] - 0.01, bounds.upper[0] + 0.01)
    assert tr.verify(net, box=box, spec=wide).verdict == "verified"
    assert tr.verify(net, box=box, spec=tr.within(None, float(bounds.upper.min()) - 1)).verdict == (
        "falsified"
    )


# --- refusals -------------------------------------------------------------------------------------

LOW, HIGH = torch.zeros(3), torch.ones(3)
BOX = {"box": (LOW, HIGH)}
X = {"x": torch.full((3,), 0.5), "eps": 0.1}
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "nothing": ({"label": 0}, "give either x with eps, or a box"),
    "both": ({**BOX, **X, "label": 0}, "give either x with eps, or a box"),
    "no radius": ({"x": X["x"], "label": 0}, "eps is missing"),
    "a radius of a box": ({**BOX, "eps": 0.1, "label": 0}, "either a box or an input"),
    "nothing to prove": (BOX, "give either a label or a spec"),
    "two things to prove": ({**BOX, "label": 0, "spec": tr.argmax(0)}, "either a label or a spec"),
    "no spec": ({**BOX, "spec": "argmax"}, "spec must be made by"),
    "array": ({**X, "x": np.zeros(3), "label": 0}, "x must be a torch tensor, got an ndarray: use"),
    "list": ({**X, "x": [0.5] * 3, "label": 0}, "x must be a torch tensor, got a list: use"),
    "label as text": ({**X, "label": "3"}, "label must be the number of a class, got '3'"),
    "label as float": ({**X, "label": 1.5}, "label must be the number of a class, got 1.5"),
    "one corner": ({"box": LOW, "label": 0}, "box must be a Box or a pair"),
    "arrays": ({"box": (np.zeros(3), np.ones(3)), "label": 0}, "box: lower must be a torch tensor"),
    "shapes": ({"box": (LOW, torch.ones(2)), "label": 0}, "lower has shape .3,., upper .2,."),
    "empty": ({"box": (HIGH, LOW), "label": 0}, "the box is empty"),
    "nan": ({"box": (LOW, HIGH * float("nan")), "label": 0}, "corners must be finite"),
    "whole numbers": ({"box": (LOW.int(), HIGH.int()), "label": 0}, "floating-point type"),
    "other shape": ({"box": (torch.zeros(2), torch.ones(2)), "label": 0}, "shape"),
    "radii": ({**X, "eps": torch.rand(2), "label": 0}, r"eps has shape \(2,\)"),
    "negative radii": ({**X, "eps": -torch.rand(3), "label": 0}, "eps must be finite radii"),
    "class": ({**BOX, "spec": tr.argmax(7)}, "asks about output 7, the network has outputs 0 to 3"),
    "rival": ({**BOX, "spec": tr.argmax(0, among=[9])}, "asks about output 9"),
    "columns": ({**BOX, "spec": tr.linear([1.0, 2.0])}, "linear has 2 columns, the network 4"),
    "ends": ({**BOX, "spec": tr.within([0.0, 1.0])}, "within has 2 ends, the network 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_questions(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as caught:
        tr.verify(network(0), **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


NETWORKS: dict[str, tuple[object, str]] = {
    "weights": (network(0).state_dict(), "load the weights into a module first"),
    "class": (nn.Linear, "that is the class, make a network of it"),
    "path": ("net.pt", "the path of an .onnx file"),
    "number": (3, "network must be a module, a graph or an .onnx file, got int"),
    "missing": ("nowhere.onnx", "nowhere.onnx"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_refusals_of_networks(name: str) -> None:
    given, message = NETWORKS[name]
    with pytest.raises(UserError, match=message):
        tr.verify(given, torch.full((3,), 0.5), 0, eps=0.1)  # type: ignore[arg-type]


SPECS: dict[str, tuple[Callable[[], object], str]] = {
    "no rival": (lambda: tr.argmax(1, among=[1]), "among must name a class other than 1"),
    "no class": (lambda: tr.argmax("a"), "label must be the number of a class"),  # type: ignore[arg-type]
    "no end": (lambda: tr.within(None, None), "within needs a lower or an upper end"),
    "nan": (lambda: tr.within(float("nan")), "within: lower must be numbers"),
    "wrong infinity": (lambda: tr.within(float("inf")), "within: lower must be numbers"),
    "turned": (lambda: tr.within(1.0, 0.0), "a lower end lies above"),
    "counts": (lambda: tr.within([0.0, 1.0], [1.0, 2.0, 3.0]), "2 lower ends"),
    "words": (lambda: tr.linear("a"), "matrix must be a tensor or a list of numbers"),  # type: ignore[arg-type]
    "nothing": (lambda: tr.linear([]), "a row for each condition"),
    "offsets": (lambda: tr.linear([1.0], [1.0, 2.0]), "one for each of 1 rows"),
    "infinite": (lambda: tr.linear([float("inf")]), "finite numbers"),
    "whole": (lambda: tr.linear([2**53 + 1]), "beyond 2.53"),
    "and": (lambda: tr.argmax(0) and tr.argmax(1), "join specs by & and |"),
    "number": (lambda: tr.argmax(0) & 1, "joined with another one"),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", SPECS)
def test_refusals_of_specs(name: str) -> None:
    make, message = SPECS[name]
    with pytest.raises(UserError, match=message):
        make()


def test_what_explodes_is_refused() -> None:
    one = tr.argmax(0) & tr.within(0, 1)
    many = functools.reduce(operator.or_, [one] * 8)
    with pytest.raises(UserError, match=rf"exceeds the limit of {SPEC_ROWS.value} rows"):
        tr.verify(network(0), box=(LOW, HIGH), spec=many)
    deep = one
    with pytest.raises(UserError, match="levels of & and"):
        for _ in range(200):
            deep = (deep | one) & one
    chain = functools.reduce(operator.and_, [tr.within(-100.0, 100.0)] * 500)
    assert tr.verify(network(0), box=(LOW, HIGH), spec=chain).verdict == "verified"
    assert repr(one) == "argmax(0) & within(0, 1)"
