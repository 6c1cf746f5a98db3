"""No verdict is ever wrong: `verified` means so in exact arithmetic, `falsified` has a witness."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
import torch
from handmade import network, rational_margin, records, verdicts
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from networks import networks
from torch import Tensor, nn

from tightrope.attacks import strong_attack, worst_margin
from tightrope.certification.properties import Ball
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


def corners_and_more(box_low: list[Fraction], box_high: list[Fraction]) -> list[list[Fraction]]:
    """Return the corners of a small box, its centre and the middles of its faces."""
    ends = [(low, (low + high) / 2, high) for low, high in zip(box_low, box_high, strict=True)]
    return [list(point) for point in product(*ends)]


def exact_ball(x: Tensor, eps: Fraction) -> tuple[list[Fraction], list[Fraction]]:
    values = [Fraction(v) for v in x.flatten().tolist()]
    low = [max(Fraction(0), v - eps) for v in values]
    return low, [min(Fraction(1), v + eps) for v in values]


# --- verified ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["ibp", "crown-ibp", "alpha", "bab"])
@settings(max_examples=10)
@given(data=st.data())
def test_what_a_stage_verifies_no_attack_breaks(stage: str, data: st.DataObject) -> None:
    check_stage(stage, data)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ibp", "crown-ibp", "alpha", "bab"])
@settings(max_examples=100)
@given(data=st.data())
def test_what_a_stage_verifies_no_attack_breaks_at_length(stage: str, data: st.DataObject) -> None:
    check_stage(stage, data)


def check_stage(stage: str, data: st.DataObject) -> None:
    """Attack what a stage verified, in float64."""
    module = data.draw(networks(classes=3)).float().eval()
    torch.manual_seed(data.draw(st.integers(0, 999)))
    x = torch.rand(8 if stage in ("ibp", "crown-ibp") else 3, *module.input_shape)
    eps = Fraction(data.draw(st.sampled_from(["1/100", "8/255", "0.1", "0.3"])))
    with torch.no_grad():
        labels = module(x).argmax(1)
    found = records(module, x, labels.tolist(), eps, stages=(stage,), timeout=2.0)
    proved = [r for r in found if r.verdict == "verified"]
    event(f"{len(proved)} of {len(x)} verified")
    if not proved:
        return
    chosen = torch.tensor([r.index for r in proved])
    claims = torch.tensor([r.margin for r in proved], dtype=torch.float64)
    graph = trace(module, module.input_shape).detach().to(torch.float64)
    box = Ball(x[chosen], eps).inner().map(torch.Tensor.double)
    labels = labels[chosen]
    tries = [strong_attack(graph, box, labels, steps=30, restarts=3), x[chosen].double()]
    for _ in range(40):
        coin = torch.rand_like(box.lower) < 0.5
        tries.append(torch.where(coin, box.lower, box.upper))
    for points in tries:
        logits = graph(points)
        margins = worst_margin(logits, labels)
        slack = 1e-12 * (1 + logits.abs().amax(1))
        assert (margins > -slack).all()
        assert (margins >= claims - slack).all()


def test_ibp_does_verify() -> None:
    """The tests above and below say nothing about a stage that never proves anything."""
    net = network(([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0]), ([[1.0, -1.0], [-1.0, 1.0]], [0.0, 0.0]))
    x = torch.tensor([[0.875, 0.125], [0.625, 0.375], [0.125, 0.875]])
    first, second, third = records(net, x, [0, 0, 1], "1/8")
    assert (first.verdict, first.stage) == ("verified", "ibp")
    assert (third.verdict, third.stage) == ("verified", "ibp")
    # The worst margin is 2 (0.75 - 0.25), and bounds of so small a network lose nothing.
    assert first.margin == pytest.approx(1.0, abs=1e-12)
    assert second.verdict != "verified"  # at (0.5, 0.5) there is a tie


@settings(max_examples=50)
@given(st.data())
def test_verified_holds_in_exact_arithmetic_for_mixed_magnitudes(data: st.DataObject) -> None:
    check_mixed_magnitudes(data)


@pytest.mark.slow
@settings(max_examples=500)
@given(st.data())
def test_verified_holds_in_exact_arithmetic_at_length(data: st.DataObject) -> None:
    check_mixed_magnitudes(data)


def check_mixed_magnitudes(data: st.DataObject) -> None:
    """Weights from 1 to 2^60 in one network: floats forget the small ones, fractions do not."""
    number = st.builds(
        lambda sign, digit, exponent: sign * digit * 2.0**exponent,
        st.sampled_from([-1, 1]),
        st.sampled_from([0, 0, 1, 1, 3]),
        st.sampled_from([0, 0, 0, -2, 24, 30, 40, 53, 60]),
    )

    def layer(outputs: int, inputs: int) -> tuple[list[list[float]], list[float]]:
        row = st.lists(number, min_size=inputs, max_size=inputs)
        weight = data.draw(st.lists(row, min_size=outputs, max_size=outputs))
        return weight, data.draw(st.lists(number, min_size=outputs, max_size=outputs))

    net = network(layer(3, 2), layer(3, 3), layer(2, 3))
    x = torch.tensor([data.draw(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=2))])
    eps = data.draw(st.sampled_from([Fraction(1, 10), Fraction(1, 10**6), Fraction(1, 10**9)]))
    with torch.no_grad():
        logits = net(x)
    assume(bool(logits.isfinite().all()))
    label = int(logits.argmax(1))
    verdict = verdicts(net, x, [label], eps, stages=("ibp",))[0]
    event(verdict)
    if verdict == "verified":
        for point in corners_and_more(*exact_ball(x, eps)):
            assert rational_margin(net, point, label) > 0


# --- networks that fool floats ------------------------------------------------------------------


def absorbing_network(exponent: int) -> nn.Sequential:
    """Return a network with `o_0 - o_1 = 1/2 - x` whose x disappears beside 2^exponent.

    The second layer computes `2^k - x` and `2^k`, the last one their difference.
    """
    big = 2.0**exponent
    return network(
        ([[0.0], [1.0]], [big, 0.0]),
        ([[1.0, -1.0], [1.0, 0.0]], [0.0, 0.0]),
        ([[1.0, -1.0], [0.0, 0.0]], [0.5, 0.0]),
    )


def telescope_network(exponent: int) -> nn.Sequential:
    """Return a network with `o_0 - o_1 = 1/2 - x`, lost between the two classes' own sums."""
    big = 2.0**exponent
    return network(
        ([[0.0], [1.0]], [big, 0.0]),
        ([[1.0, -1.0], [1.0, 0.0]], [0.0, 0.0]),
        ([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.0]),
    )


FOOLING = [absorbing_network, telescope_network]
EXPONENTS = [24, 25, 26, 30, 40, 52, 53, 54, 60]


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("build", FOOLING)
def test_a_network_that_fools_floats_is_not_verified(build, exponent: int) -> None:  # type: ignore[no-untyped-def]
    net = build(exponent)
    x, eps = torch.tensor([[0.375]]), Fraction(1, 4)
    # In exact arithmetic 0.375 belongs to class 0, and 0.6 in its ball to class 1 ...
    assert rational_margin(net, [0.375], 0) > 0 > rational_margin(net, [Fraction(6, 10)], 0)
    # ... but float32 sees class 0 everywhere.
    if exponent >= 26:
        with torch.no_grad():
            assert (net(torch.linspace(0.125, 0.625, 101)[:, None]).argmax(1) == 0).all()
    for stages in (("ibp",), ("ibp", "attack"), ("attack", "ibp")):
        assert verdicts(net, x, [0], eps, stages=stages) != ["verified"]


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_violation_in_the_weights_themselves_is_seen(exponent: int) -> None:
    """Margins are `-x` here, though each class alone is dominated by huge equal weights."""
    big = 2.0**exponent
    net = network(
        ([[0.0], [1.0]], [1.0, 0.0]),
        ([[big, 0.0], [big, 1.0]], [0.25, 0.0]),
    )
    x = torch.tensor([[0.125]])
    assert rational_margin(net, [0.125], 0) > 0 > rational_margin(net, [0.5], 0)
    assert verdicts(net, x, [0], "1/2", stages=("ibp",)) != ["verified"]


@pytest.mark.parametrize("exponent", [24, 40, 52])
def test_strict_bounds_are_not_blind_to_float64s_own_digits(exponent: int) -> None:
    """Below 2^53 float64 keeps the small term: the same network is proved where it is right."""
    x = torch.tensor([[0.125]])
    margin = records(absorbing_network(exponent), x, [0], "1/1000000")[0].margin
    if exponent < 40:
        assert verdicts(absorbing_network(exponent), x, [0], "1/1000000") == ["verified"]
        assert margin is not None and 0 < margin <= 0.375
    # Whatever it says, the bound must lie below the exact worst case.
    assert margin is None or Fraction(margin) <= Fraction(3, 8) - Fraction(1, 10**6)


# --- overflow and undefined outputs -----------------------------------------------------------


def test_overflow_of_bounds_is_unknown() -> None:
    """Ten layers of 2^120 leave float64; `inf - inf` must not look like a proof."""
    huge = 2.0**120
    hidden = ([[huge, 0.0], [0.0, huge]], [0.0, 0.0])
    layers = [hidden] * 10
    net = network(*layers, ([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0]))
    x = torch.tensor([[0.75, 0.25]])
    assert rational_margin(net, [0.75, 0.25], 0) > 0
    for stages in (("ibp",), ("ibp", "attack"), ("attack", "ibp")):
        assert "verified" not in verdicts(net, x, [0], "1/100", stages=stages)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["hidden weight", "hidden bias", "last weight", "last bias"])
def test_weights_that_are_not_finite_prove_nothing(bad: float, where: str) -> None:
    net = network(([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0]), ([[1.0, 0.0], [0.0, 0.0]], [0.0, -1.0]))
    x = torch.tensor([[0.75, 0.5], [0.0, 0.0]])
    assert verdicts(net, x, [0, 0], "1/100", stages=("ibp",)) == ["verified", "verified"]
    layer = net[1 if where.startswith("hidden") else 3]
    with torch.no_grad():
        getattr(layer, where.split()[1]).view(-1)[0] = bad
    for label in (0, 1):
        assert "verified" not in verdicts(net, x, [label, label], "1/100")


def nan_network() -> nn.Sequential:
    """Return a network whose exact margin is 2^130 but whose float32 outputs are all NaN."""
    big = 2.0**127
    return network(
        ([[0.0], [0.0]], [big, big]),
        ([[16.0, 0.0], [0.0, 8.0]], [0.0, 0.0]),
        ([[1.0, -1.0], [-1.0, 1.0]], [0.0, 0.0]),
    )


def test_an_undefined_output_is_never_verified() -> None:
    """A network that answers NaN at the sample itself is not robust there."""
    net, x = nan_network(), torch.tensor([[0.5]])
    assert rational_margin(net, [0.5], 0) > 0
    with torch.no_grad():
        assert net(x).isnan().all()
    for stages in (("ibp",), ("attack", "ibp")):
        assert verdicts(net, x, [0], "1/100", stages=stages) != ["verified"]


def test_an_undefined_output_is_not_a_correct_answer() -> None:
    record = records(nan_network(), torch.tensor([[0.5]]), [0], "1/100")[0]
    assert not record.correct or record.verdict == "unknown"
    assert record.margin is None


# --- ties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_constant_network_is_never_verified(label: int) -> None:
    net = network(([[0.0]], [0.0]), ([[0.0], [0.0], [0.0]], [0.25, 0.25, 0.25]))
    assert verdicts(net, torch.tensor([[0.5]]), [label], "1/10") != ["verified"]


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**60])
def test_a_tie_at_one_corner_is_not_verified(scale: float) -> None:
    """`o_0 - o_1 = s (3/4 - x)`: zero at the ball's very end, positive everywhere else."""
    net = network(([[1.0]], [0.0]), ([[-scale], [0.0]], [0.75 * scale, 0.0]))
    x, eps = torch.tensor([[0.5]]), Fraction(1, 4)
    assert rational_margin(net, [Fraction(3, 4)], 0) == 0
    assert verdicts(net, x, [0], eps, stages=("ibp",)) == ["unknown"]
    smaller = eps - Fraction(1, 10**6)
    assert verdicts(net, x, [0], smaller, stages=("ibp",)) == ["verified"]


def test_a_radius_just_too_large_is_not_verified() -> None:
    """The ball is the rational one: 1/10 is too much where the float 0.1 would be, too."""
    net = network(([[1.0]], [0.0]), ([[-1.0], [0.0]], [0.75, 0.0]))
    x = torch.tensor([[0.5]])
    for eps in (Fraction(1, 4), Fraction(1, 4) + Fraction(1, 10**30)):
        assert verdicts(net, x, [0], eps, stages=("ibp",)) == ["unknown"]


# --- falsified ----------------------------------------------------------------------------------


def test_misclassified_samples_are_falsified_at_once() -> None:
    net = network(([[1.0]], [0.0]), ([[1.0], [-1.0]], [0.0, 1.0]))  # class 0 above one half
    x = torch.tensor([[0.25], [0.875], [0.125]])
    found = records(net, x, [0, 0, 1], "1/100")
    wrong = found[0]
    assert (wrong.verdict, wrong.stage, wrong.prediction) == ("falsified", "natural", 1)
    assert wrong.margin == pytest.approx(-0.5)
    assert wrong.counterexample is None and list(wrong.times) == ["natural"]
    assert [r.verdict for r in found[1:]] == ["verified", "verified"]


@pytest.mark.parametrize(
    "stages", [("ibp", "attack"), ("attack", "ibp"), ("attack",), ("autoattack",)]
)
def test_what_an_attack_breaks_comes_with_the_point(stages: tuple[str, ...]) -> None:
    net = network(([[1.0]], [0.0]), ([[1.0], [-1.0]], [0.0, 1.0]))
    x, eps = torch.tensor([[0.5625], [0.9375]]), Fraction(1, 10)
    points: dict[int, Tensor] = {}
    broken, robust = records(net, x, [0, 0], eps, stages=stages, points=points)
    (attack,) = (stage for stage in stages if stage != "ibp")
    assert (broken.verdict, broken.stage) == ("falsified", attack)
    assert broken.counterexample == "0.npy" and list(points) == [0]
    assert abs(Fraction(points[0].item()) - Fraction(0.5625)) <= eps
    with torch.no_grad():
        assert int(net(points[0][None]).argmax()) == 1
    assert broken.margin is not None and broken.margin <= 0
    assert robust.verdict == ("verified" if "ibp" in stages else "unknown")
    assert robust.stage == ("ibp" if "ibp" in stages else attack)


def test_the_sample_range_limits_the_ball() -> None:
    """Beyond 0 and 1 there are no pixels: a network that fails only there is verified."""
    net = network(([[1.0], [-1.0]], [-1.0, 0.0]), ([[-1.0, -1.0], [0.0, 0.0]], [0.25, 0.0]))
    x = torch.tensor([[0.0], [1.0], [0.5]])  # relu(x - 1) + relu(-x) is zero within [0, 1]
    assert rational_margin(net, [Fraction(-1, 2)], 0) < 0 < rational_margin(net, [0.0], 0)
    assert verdicts(net, x, [0, 0, 0], "1") == ["verified"] * 3


# --- stages ---------------------------------------------------------------------------------------


def test_stages_run_in_the_order_asked_for() -> None:
    net = network(([[1.0]], [0.0]), ([[1.0], [-1.0]], [0.0, 1.0]))
    x = torch.tensor([[0.9375]])
    assert list(records(net, x, [0], "1/10", stages=("ibp", "attack"))[0].times) == [
        "natural",
        "ibp",
    ]
    assert list(records(net, x, [0], "1/10", stages=("attack", "ibp"))[0].times) == [
        "natural",
        "attack",
        "ibp",
    ]


def test_unknown_keeps_the_best_bound() -> None:
    net = absorbing_network(26)
    record = records(net, torch.tensor([[0.375]]), [0], "1/4")[0]
    assert (record.verdict, record.stage) == ("unknown", "attack")
    assert record.margin is not None and Fraction(record.margin) <= Fraction(-1, 8)
    assert list(record.times) == ["natural", "ibp", "attack"]
    assert record.seconds == pytest.approx(sum(record.times.values()))
