"""Points of zonotopes by their error coefficients, against the sums that they are."""

import pytest
import torch
from colt_networks import RADIUS, batch, deep_net, lines_of
from torch import nn
from training_reference import SHAPE

from tightrope.attacks import CrossEntropy, Steps
from tightrope.attacks.coefficients import LatentZonotope
from tightrope.box import Box
from tightrope.graph import trace

pytestmark = pytest.mark.usefixtures("one_thread")


def by_hand(net, ball, lines, coefficients):
    """`head + sum_g E_g` behind the ReLUs in `lines`: each group on its own way, without biases."""
    shapes = [ball.center.shape, *(slope.shape for slope, _ in lines)]
    groups, end = [], 0
    for shape in shapes:
        rows = coefficients[:, end : (end := end + shape[1:].numel())]
        if len(shape) == 4:  # channels last
            rows = rows.view(-1, shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)
        groups.append(rows.view(shape) if len(shape) == 2 else rows)
    head, errors, seen = ball.center, [ball.radius * groups[0]], 0
    for layer in net:
        if isinstance(layer, nn.ReLU):
            if seen == len(lines):
                return head + sum(errors)
            slope, mu = lines[seen]
            seen += 1
            head = slope * head + mu
            errors = [slope * e for e in errors] + [mu * groups[seen]]
        else:
            errors = [layer(e) - layer(torch.zeros_like(e)) for e in errors]
            head = layer(head)
    return head + sum(errors)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_points_are_heads_plus_errors(count):
    net = deep_net()
    graph, (x, _) = trace(net, SHAPE), batch()
    ball = Box.ball(x, RADIUS)
    lines = lines_of(graph, ball, count)
    zono = LatentZonotope(graph, ball, lines)
    sizes = [32, 64, 12, 6][: count + 1]
    assert zono.box.lower.shape == (7, sum(sizes))
    assert (zono.box.lower == -1).all() and (zono.box.upper == 1).all()
    coefficients = zono.box.sample()
    # Up to the input of the next ReLU, or the end: the whole set, not one more error.
    place = graph.nodes[graph.relus[count]].inputs[0] if count < 3 else len(graph.nodes) - 1
    found = zono.point(coefficients, place)
    torch.testing.assert_close(found, by_hand(net, ball, list(lines.values()), coefficients))


def test_where_all_relus_are_stable_the_set_is_the_affine_image():
    net = deep_net()
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([50.0, -50.0, 50.0, 50.0]))
        net[2].bias.copy_(torch.tensor([900.0, -900.0, 900.0]))
    graph, (x, _) = trace(net, SHAPE), batch()
    ball = Box.ball(x, RADIUS)
    lines = lines_of(graph, ball, 2)
    assert all(set(slope.unique().tolist()) == {0.0, 1.0} for slope, _ in lines.values())
    assert not any(offset.any() for _, offset in lines.values())
    zono = LatentZonotope(graph, ball, lines)
    coefficients = zono.box.sample()
    image = coefficients[:, :32].view(7, 4, 4, 2).permute(0, 3, 1, 2)
    exact = net[:5](ball.center + ball.radius * image)
    torch.testing.assert_close(zono.point(coefficients, graph.relus[1] + 1), exact)


def test_every_output_of_the_layers_is_a_point():
    """Where the strips hold the ReLUs, what a point of the ball becomes has coefficients."""
    net = deep_net()
    graph, (x, _) = trace(net, SHAPE), batch()
    ball = Box.ball(x, RADIUS)
    lines = lines_of(graph, ball, 2)
    zono = LatentZonotope(graph, ball, lines)
    point = ball.sample()
    rows = [((point - ball.center) / ball.radius).permute(0, 2, 3, 1).flatten(1)]
    value = point
    for layer, (slope, offset) in zip((net[0], net[2]), lines.values(), strict=True):
        before = layer(value)
        value = before.relu()
        error = (value - slope * before) / torch.where(offset == 0, 1.0, offset) - 1
        error = torch.where(offset == 0, 0.0, error)
        assert error.abs().max() <= 1 + 1e-9 and error.abs().max() > 0.5
        rows.append(error.permute(0, 2, 3, 1).flatten(1))
    found = zono.point(torch.cat(rows, 1), graph.relus[1])
    torch.testing.assert_close(found, value)


def test_the_attack_climbs_and_stays_inside():
    graph, (x, y) = trace(deep_net(), SHAPE), batch()
    ball = Box.ball(x, RADIUS)
    zono = LatentZonotope(graph, ball, lines_of(graph, ball, 2))
    goal, losses = CrossEntropy(y), []
    for steps in (1, 7):
        torch.manual_seed(0)
        found = zono.worst(goal, Steps(steps, 0.25))
        assert found.abs().max() <= 1
        losses.append(goal(zono.point(found, len(graph.nodes) - 1)))
    torch.manual_seed(0)
    begin = zono.box.sample()
    start = goal(zono.point(begin, len(graph.nodes) - 1))
    assert start.mean() < losses[0].mean() < losses[1].mean()
    # One step moves each coefficient by a quarter, or to the end.
    torch.manual_seed(0)
    moved = (zono.worst(goal, Steps(1, 0.25)) - begin).abs()
    assert ((moved - 0.25).abs() < 1e-12).double().mean() > 0.5 and moved.max() < 0.25 + 1e-12
    assert not any(t.requires_grad for n in zono.graph.nodes for t in vars(n.op).values()
                   if isinstance(t, torch.Tensor))  # fmt: skip
