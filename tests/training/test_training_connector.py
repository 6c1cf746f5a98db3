"""The gradient connector: the identity on points, the paper's pseudo-gradients to the bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightrope.box import Box
from tightrope.training.connector import connect, pseudo_gradients

pytestmark = pytest.mark.usefixtures("one_thread")

SLACKS = [0.0, 0.3, 0.5, 1.0]
TOLERANCE = 1e-5  # of the published implementation: below it, a width counts as none


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def slopes(lower, upper, point, slack):
    """Return `d point / d lower` and `d point / d upper` for one coordinate, by autograd."""
    ends = [torch.full((1, 1), v, dtype=torch.float64, requires_grad=True) for v in (lower, upper)]
    connect(Box(*ends), numbers(point).view(1, 1, 1), slack).sum().backward()
    return tuple(end.grad.item() for end in ends)


def paper(lower, upper, point, slack):
    """The formula of Section 3.2, and the same from above, for boxes with a width."""
    if slack == 0:
        return float(point == lower), float(point == upper)
    reach = slack * (upper - lower)
    return max(0.0, 1 - (point - lower) / reach), max(0.0, 1 - (upper - point) / reach)


# --- the formula ------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("lower,upper", [(-1.0, 3.0), (0.0, 0.25), (-7.5, -7.0)])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.15, 0.29, 0.31, 0.45, 0.55, 0.75, 0.99, 1.0])
def test_pseudo_gradients_are_the_papers(slack, lower, upper, share):
    point = lower + share * (upper - lower)
    expected = paper(lower, upper, point, slack)
    # A point exactly at the end of a bound's reach keeps what the published clamp leaves it.
    left = TOLERANCE / 2 / (slack * (upper - lower)) if slack else 0.0
    assert slopes(lower, upper, point, slack) == pytest.approx(expected, rel=1e-9, abs=1.01 * left)
    if 0 < share < 1:
        assert slopes(lower, upper, point, slack) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "slack,point,expected",
    [
        # in the box [2, 6]
        (0.5, 2.0, (1.0, 0.0)),
        (0.5, 3.0, (0.5, 0.0)),
        (0.5, 5.5, (0.0, 0.75)),
        (0.5, 6.0, (0.0, 1.0)),
        (0.3, 2.6, (0.5, 0.0)),
        (0.3, 4.0, (0.0, 0.0)),  # out of both bounds' reach
        (0.3, 5.4, (0.0, 0.5)),
        (1.0, 2.0, (1.0, 0.0)),
        (1.0, 3.0, (0.75, 0.25)),  # the linear connector: shares of one
        (1.0, 5.0, (0.25, 0.75)),
        (0.0, 2.0, (1.0, 0.0)),
        (0.0, 2.0 + 1e-9, (0.0, 0.0)),  # the binary connector: on the bound or not at all
        (0.0, 4.0, (0.0, 0.0)),
        (0.0, 6.0, (0.0, 1.0)),
    ],
)
def test_by_hand(slack, point, expected):
    assert slopes(2.0, 6.0, point, slack) == pytest.approx(expected, rel=1e-9, abs=1e-5)


@pytest.mark.parametrize("slack", [0.3, 0.5])
def test_a_point_near_one_bound_does_not_move_with_the_other(slack):
    assert slopes(0.0, 1.0, 0.1, slack)[1] == 0.0
    assert slopes(0.0, 1.0, 0.9, slack)[0] == 0.0


@settings(max_examples=200)
@given(
    lower=st.floats(-5, 5),
    width=st.sampled_from([0.0, 1e-9, 1e-6, 1e-4, 0.01, 1.0, 30.0]),
    share=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0]),
    slack=st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]),
)
def test_the_formula_of_the_published_code(lower, width, share, slack):
    """The formula with its indicators and clamps, wherever it does not hang on rounding."""
    low, up = lower, lower + width
    z = min(max(low + share * (up - low), low), up)
    s = slack * (up - low)
    overlaps = (low + s) - z, z - (up - s)
    found = slopes(low, up, z, slack)
    for overlap, value in zip(overlaps, found, strict=True):
        if abs(overlap) < 1e-13 and width > 0:
            continue  # the indicator is undecided
        expected = max(overlap, TOLERANCE / 2) / max(s, TOLERANCE) if overlap >= 0 else 0.0
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("slack", [0.0, 1e-3, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("place", [-2.0, 0.0, 0.7])
def test_both_bounds_of_a_box_without_width_carry_one_half(slack, place):
    assert slopes(place, place, place, slack) == (0.5, 0.5)


@pytest.mark.parametrize("slack", SLACKS)
def test_coordinates_are_independent(slack):
    lower, upper = numbers(0.0, 1.0, -1.0), numbers(2.0, 1.0, 3.0)
    points = numbers(0.2, 1.0, 2.6)
    together = pseudo_gradients(lower, upper, points, slack)
    for i in range(3):
        alone = slopes(lower[i].item(), upper[i].item(), points[i].item(), slack)
        assert [t[i].item() for t in together] == pytest.approx(alone)


# --- shared bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("slack", SLACKS)
def test_estimators_add_up_on_the_bounds_they_share(slack):
    torch.manual_seed(0)
    shape = (3, 2, 4)
    lower = torch.randn(3, 2, 4, dtype=torch.float64)
    upper = lower + torch.rand(shape, dtype=torch.float64)
    upper[0, 0] = lower[0, 0]
    box = Box(lower.requires_grad_(), upper.requires_grad_())
    points = box.detach().sample(5)
    points[:, 0], points[:, 1] = box.lower.detach(), box.upper.detach()
    incoming = torch.randn(3, 5, 2, 4, dtype=torch.float64)
    (connect(box, points, slack) * incoming).sum().backward()
    expected = torch.zeros(2, *shape, dtype=torch.float64)
    for n in range(3):
        for e in range(5):
            to = pseudo_gradients(lower[n].detach(), upper[n].detach(), points[n, e], slack)
            for side in range(2):
                expected[side, n] += to[side] * incoming[n, e]
    torch.testing.assert_close(lower.grad, expected[0])
    torch.testing.assert_close(upper.grad, expected[1])
    assert lower.grad.abs().min(0).values.max() > 0


def test_gradients_reach_boxes_held_as_centre_and_radius():
    center, radius = (numbers(1.0, 2.0).view(1, 2).requires_grad_() for _ in range(2))
    points = numbers(0.0, 3.0).view(1, 1, 2)  # lower bound of [0, 2]; 3/4 of [0, 4]
    connect(Box.around(center, radius), points, 0.5).sum().backward()
    assert center.grad.tolist() == [[1.0, 0.5]]  # to lower + to upper
    assert radius.grad.tolist() == [[-1.0, 0.5]]  # to upper - to lower


def test_extractor_parameters_get_the_connected_gradient():
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    lower, upper = numbers(1.0).view(1, 1), numbers(3.0).view(1, 1)
    box = Box(weight * lower, weight * upper)  # [2, 6]
    points = connect(box, numbers(3.0, 6.0).view(1, 2, 1), 0.5)
    (points[0, 0, 0] ** 2 + 5 * points[0, 1, 0]).backward()
    # 2 z * 0.5 on the lower bound (slope 1 in the weight), 5 * 1 on the upper (slope 3)
    assert weight.grad.item() == pytest.approx(2 * 3.0 * 0.5 * 1 + 5 * 3)


# --- the points -------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", SLACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_pass_unchanged(slack, dtype):
    torch.manual_seed(1)
    lower = torch.randn(2, 3, dtype=dtype).requires_grad_()
    box = Box(lower, lower + 1)
    points = box.detach().sample(4)
    before = points.clone()
    output = connect(box, points, slack)
    assert torch.equal(output, before) and output.dtype == dtype
    (output**2).sum().backward()
    assert torch.equal(points, before)
    assert lower.grad.dtype == dtype and lower.grad.isfinite().all()


@pytest.mark.parametrize("slack", SLACKS)
def test_points_get_no_gradient(slack):
    lower = torch.zeros(2, 3, dtype=torch.float64).requires_grad_()
    points = torch.zeros(2, 4, 3, dtype=torch.float64).requires_grad_()
    connect(Box(lower, torch.ones_like(lower)), points, slack).sum().backward()
    assert points.grad is None
    assert lower.grad.tolist() == [[4.0] * 3] * 2


def test_the_default_is_one_half():
    lower = torch.zeros(1, 1, dtype=torch.float64).requires_grad_()
    connect(Box(lower, torch.ones_like(lower)), numbers(0.25).view(1, 1, 1)).sum().backward()
    assert lower.grad.item() == 0.5
