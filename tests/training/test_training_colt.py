"""COLT: its bounds, the loss of each stage, gradients of parts of a batch."""

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from colt_networks import RADIUS, batch, deep_net, lines_of, run, stage

from tightrope.attacks.coefficients import LatentZonotope
from tightrope.box import Box
from tightrope.domains import interval, zonotope
from tightrope.graph import Graph, trace
from tightrope.precision import searching
from tightrope.training.batchnorm import FixedModel
from tightrope.training.objectives import PGD
from tightrope.training.stages import freeze
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def centres(monkeypatch):
    """Attacks begin in the middle, and random projections are the same everywhere."""
    monkeypatch.setattr(Box, "sample", lambda self, count=None: self.center.clone())

    def tangents(t):
        angles = torch.arange(t.numel(), dtype=torch.float64) * 0.618 % 1 * 3 - 1.5
        return t.copy_(angles.tan().view(t.shape))

    monkeypatch.setattr(torch.Tensor, "cauchy_", tangents)


# --- bounds -----------------------------------------------------------------------------------


def test_projections_estimate_the_zonotope():
    graph, (x, _) = trace(deep_net(), reference.SHAPE), batch(1)
    ball = Box.ball(x, RADIUS)
    inputs = [graph.nodes[i].inputs[0] for i in graph.relus]
    exact = zonotope.bounds(graph, ball, keep=inputs)[1]
    many = stage(2, (0, 1, 3), projections=64).bounds(graph, ball)  # no group has more terms
    torch.manual_seed(0)
    drawn = [stage(2, (0, 1, 3), projections=31).bounds(graph, ball) for _ in range(300)]
    for relu, before in zip(graph.relus, inputs, strict=True):
        torch.testing.assert_close(many[relu].radius, exact[before].radius)
        radii = torch.stack([found[relu].radius for found in drawn])
        assert (radii.std(0) > 0.03 * radii.mean(0)).all() == (relu != graph.relus[0])
        torch.testing.assert_close(radii.median(0).values, exact[before].radius, rtol=0.15, atol=0)


def test_bounds_behind_affine_layers_are_exact_and_drawn_for_none():
    graph, (x, _) = trace(deep_net(), reference.SHAPE), batch()
    ball = Box.ball(x, RADIUS)
    state = torch.get_rng_state()
    for number, layers in ((0, (0, 1)), (1, (0, 1))):
        (box,) = stage(number, layers).bounds(graph, ball).values()
        expected = interval.bounds(graph, ball, keep=(1,))[1][1]
        assert torch.equal(box.lower, expected.lower) and torch.equal(box.upper, expected.upper)
    assert stage(0, (0,)).bounds(graph, ball) == {}
    assert torch.equal(torch.get_rng_state(), state)


def test_held_out_data_is_bounded_in_pieces_that_fit():
    graph = trace(deep_net(), reference.SHAPE)
    assert stage(0).largest_batch(graph) is None  # no projections
    assert stage(1, (0, 1)).largest_batch(graph) is None
    sizes = [stage(n, projections=k).largest_batch(graph) for n, k in ((1, 50), (1, 100), (2, 50))]
    assert sizes[0] == (1 << 30) // (12 * 50 * 2 * 64)  # two groups, the first map has 64 numbers
    assert sizes[1:] == [sizes[0] // 2, sizes[0]]
    assert stage(1, projections=10**9).largest_batch(graph) == 1


def test_bounds_have_gradients_for_the_next_layers_only():
    """The frozen ones have none, and without a next stage nobody asks."""
    net, (x, _) = deep_net(), batch()
    ball = Box.ball(x, RADIUS)
    cold = freeze(trace(net, reference.SHAPE), 1)
    boxes = stage(1).bounds(cold, ball)
    assert [box.lower.requires_grad for box in boxes.values()] == [False, True]
    boxes[cold.relus[1]].lower.sum().backward()
    without = [name for name, p in net.named_parameters() if p.grad is None]
    assert without == ["0.weight", "0.bias", "5.weight", "5.bias", "7.weight", "7.bias"]
    boxes = stage(2).bounds(freeze(trace(net, reference.SHAPE), 2), ball)
    assert not any(box.lower.requires_grad for box in boxes.values())


# --- the loss ---------------------------------------------------------------------------------


def test_the_first_stage_is_pgd_in_the_ball():
    colt, gradients = run(stage(0, (0,)))
    pgd, expected = run(PGD(steps=7, step_size=0.25))
    assert colt.value.item() == pytest.approx(pgd.value.item(), rel=1e-12)
    assert torch.equal(colt.robust, pgd.robust)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_at_radius_zero_points_are_the_clean_ones(number):
    net = deep_net()
    loss, gradients = run(stage(number, area_weight=0.0), 0.5, net=net, radius=0.0)
    x, y = batch()
    assert loss.value.item() == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-12)
    assert loss.robust.tolist() == (net(x).argmax(1) == y).tolist()
    assert all(g.isfinite().all() for g in gradients.values())
    graph = trace(net, reference.SHAPE)
    ball = Box.ball(x, 0.0)
    zono = LatentZonotope(graph, ball, lines_of(graph, ball, number))
    cut = graph.relus[number]
    latent = Graph(graph.nodes[: cut + 1])(x)
    assert torch.equal(zono.point(zono.box.sample(), cut), latent)


def test_losses_are_mixed_and_areas_join_in(centres):
    """`k L(current) + (1 - k) L(previous) + k rho R(next)`, with rho 1.5 times that before."""
    net, options = deep_net(), {"area_weight": 0.4}
    x, y = batch()
    natural = F.cross_entropy(net(x), y).item()
    alone = [run(stage(0, (0, n)[: 1 + (n > 0)], area_weight=0), net=net)[0] for n in range(3)]
    at = [alone[0].value.item()]
    at += [run(stage(1, (0, n), area_weight=0), net=net)[0].value.item() for n in (1, 2)]
    graph = trace(net, reference.SHAPE)
    boxes = stage(2).bounds(graph, Box.ball(x, RADIUS))
    areas = []
    for box in boxes.values():
        low, high = box.lower, box.upper
        areas.append(sum((-low).clamp(min=0).mul(high.clamp(min=0)).flatten().tolist()) / 7)
    for k in (0.0, 0.25, 1.0):
        values = [run(stage(n, **options), k, net=net)[0].value.item() for n in range(3)]
        expected = [
            k * at[0] + (1 - k) * natural + k * 0.4 * areas[0],
            k * at[1] + (1 - k) * at[0] + k * 0.4 * 1.5 * areas[1],
            k * at[2] + (1 - k) * at[1],
        ]
        assert values == pytest.approx(expected, rel=1e-9)
    assert len({*at, natural}) == 4 and min(areas) > 0


def test_areas_teach_the_layers_in_between_only(centres):
    """The others learn from the point, which is a constant: its layers learn nothing from it."""
    net = deep_net()
    graph, (x, y) = trace(net, reference.SHAPE), batch()
    found = {}
    for weight in (0.0, 1.0):
        net.zero_grad(set_to_none=True)
        step = Step(freeze(graph, 1), stage(1, area_weight=weight), RADIUS, progress=1.0)
        step(x, y, RADIUS, annealing=False)
        assert net[0].weight.grad is None and net[0].bias.grad is None
        found[weight] = reference.gradients(net)
    changed = {k for k in found[0.0] if not torch.equal(found[0.0][k], found[1.0][k])}
    assert changed == {"2.weight", "2.bias"}


@pytest.mark.parametrize("number", [1, 2])
def test_neurons_without_width_have_finite_gradients(number):
    net = deep_net()
    with torch.no_grad():
        net[0].weight[1] = 0.0  # always at its bias, once at zero
        net[0].bias[1] = 0.0
        net[2].weight[0] = 0.0
        net[2].bias[0] = 0.0
    loss, gradients = run(stage(number, area_weight=1.0), 0.5, net=net)
    assert loss.value.isfinite()
    assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("progress", [0.3, 1.0])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_parts_of_a_batch_have_the_gradient_of_the_whole(number, progress, centres):
    results = []
    for accumulate in (1, 2, 3):
        net = deep_net()
        graph = freeze(trace(net, reference.SHAPE), number)
        step = Step(graph, stage(number), RADIUS, l1=1e-3, accumulate=accumulate, progress=progress)
        result = step(*batch(), RADIUS, annealing=False)
        results.append((result, reference.gradients(net)))
    (whole, expected), *others = results
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    for sums, found in others:
        assert sums.loss == pytest.approx(whole.loss, rel=1e-9)
        assert (sums.natural, sums.robust) == (whole.natural, whole.robust)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_bfloat16_searches_and_full_precision_evaluates():
    net = deep_net().float()
    x, y = (t.float() if t.is_floating_point() else t for t in batch())
    model = FixedModel(trace(net, reference.SHAPE), x)
    values = []
    for kind in ("full", "bf16"):
        torch.manual_seed(0)
        with searching(kind):
            loss = stage(2)(model, x, y, RADIUS)
        assert loss.value.dtype == torch.float32
        values.append(loss.value.item())
    assert values[1] == pytest.approx(values[0], rel=0.05)
