"""Networks for TAPS, and the comparison of losses on them."""

import copy

import torch
import training_reference as reference

from tightrope.graph import trace
from tightrope.training.batchnorm import training_model

RADIUS = 0.1


def run(net, objective, radius=RADIUS, data=None):
    """Return value and gradients of a loss, always from the same random points."""
    net = copy.deepcopy(net)
    x, y = data or reference.batch()
    torch.manual_seed(11)
    loss = objective(training_model(trace(net, reference.SHAPE), x), x, y, radius)
    loss.value.backward()
    return loss, reference.gradients(net)


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)
