"""How much a GPU is asked to do in a training step: limits on launches and on waits.

The counts of a narrow CNN7 are those of the wide one: layers count, not their widths. The limits
are a little above what was measured, so that a change that asks for more is noticed.
"""

import pytest
import torch
from pretend_cuda import pretend_cuda

from tightrope import nets
from tightrope.graph import trace
from tightrope.training import connector
from tightrope.training.assistance import assisted
from tightrope.training.initialization import initialize
from tightrope.training.objectives import (
    ADCERT,
    CAP,
    CROWNIBP,
    IBP,
    MART,
    SABR,
    STAPS,
    TAPS,
    ARoW,
    CCDist,
    DiffAI,
    Noise,
)
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE, EPS = (1, 28, 28), 0.1
SETTINGS = Settings.parse({"optimizer": "adam"})


@pytest.fixture(scope="module")
def cnn7():
    """A narrow CNN7 with BatchNorm, behind a normalisation, and its graph on the GPU."""
    torch.manual_seed(1)
    arguments = nets.find("cnn7").resolve({"width": 4, "batch_norm": True})
    made = nets.Architecture("cnn7", SHAPE, 10, ((0.13,), (0.31,)), arguments).build()
    with pretend_cuda():
        module = made.to("cuda", memory_format=torch.channels_last)
        graph = trace(module, SHAPE)
        initialize(graph)
    return module, graph


def count(cnn7, objective, samples=8, **options):
    """Return the counts of a whole step: zeroed gradients, the loss, backward, the optimiser."""
    module, graph = cnn7
    helpers = Settings.parse(options.pop("helpers", {}))
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(samples, *SHAPE, generator=generator)
    y = torch.randint(10, (samples,), generator=generator)
    with pretend_cuda() as counts:
        optimizer = make_optimizer(module, SETTINGS)
        x, y = x.to("cuda"), y.to("cuda")
        if getattr(objective, "needs_teacher", False):
            options["teacher"] = graph.fold_batchnorm().detach()
        annealing = bool(options) and "teacher" not in options
        plain = Step(graph, objective, EPS, tightness_weight=helpers.tightness_weight, **options)
        step = assisted(plain, helpers, optimizer)
        for _ in range(2):  # the first makes the optimiser's state
            counts.clear()
            optimizer.zero_grad(set_to_none=True)
            step(x, y, EPS, annealing=annealing)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 10.0, foreach=True)
            optimizer.step()
    return counts


LIMITS = {
    "ibp": (IBP(), 560, 1),
    "sabr": (SABR(), 960, 1),
    "taps-1": (TAPS(1), 900, 4),
    "taps-3": (TAPS(3), 1080, 4),
    "staps-1": (STAPS(1), 1400, 4),
    "taps-1-restarts": (TAPS(1, restarts=3), 1500, 10),
    "crown-ibp": (CROWNIBP(end_beta=0.5), 1250, 1),
    "crown-ibp-fused": (CROWNIBP(end_beta=0.5, loss="fused"), 1330, 1),
    "diffai": (DiffAI(), 560, 1),
    "cap": (CAP(), 8800, 1),
    "ad-cert": (ADCERT(), 1050, 1),
    "cc-dist": (CCDist(), 1080, 1),
    "arow": (ARoW(), 980, 1),
    "mart": (MART(), 930, 1),
    "noise": (Noise(), 380, 1),
}
HELPERS = {
    "sam": ({"sam_rho": 0.05}, 1150, 2),
    "edac": ({"edac_weight": 0.3}, 1410, 2),
    "rgs": ({"smoothing": "rgs", "smoothing_pairs": 1}, 1120, 2),
    "tightness": ({"tightness_weight": 1e-4}, 860, 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_launches_and_waits_no_more_than(name, cnn7):
    objective, ops, waits = LIMITS[name]
    counts = count(cnn7, objective)
    assert counts.ops.total() <= ops, counts.describe()
    assert counts.waits.total() <= waits, counts.describe()
    assert not counts.uploads


@pytest.mark.parametrize("name", HELPERS)
def test_a_step_with_a_helper_launches_and_waits_no_more_than(name, cnn7):
    given, ops, waits = HELPERS[name]
    counts = count(cnn7, IBP(), helpers=given)
    assert counts.ops.total() <= ops, counts.describe()
    assert counts.waits.total() <= waits, counts.describe()
    assert not counts.uploads


def test_the_regularisers_wait_for_nothing(cnn7):
    counts = count(cnn7, IBP(), regularizer_weight=0.5, l1=1e-6)
    assert counts.ops.total() <= 1400, counts.describe()
    assert counts.waits.total() <= 1, counts.describe()


def test_counts_do_not_grow_with_the_batch(cnn7, monkeypatch):
    """On a CPU the connector works in pieces of a few samples; here in one."""
    monkeypatch.setattr(connector, "PIECE", 1)
    few, many = (count(cnn7, TAPS(1), samples).ops.total() for samples in (4, 16))
    assert abs(many - few) <= 40  # those who have come to rest are left out now and then
