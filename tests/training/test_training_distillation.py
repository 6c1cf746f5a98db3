"""AD-CERT and CC-Dist: their formulas, their ends, and the teacher's part in them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import training_reference as reference
from taught import teacher
from torch import nn

from tightrope.attacks import Divergence
from tightrope.box import Box
from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.training.batchnorm import FixedModel, training_model
from tightrope.training.objectives import ADCERT, CCIBP, IBP, MTLIBP, CCDist
from tightrope.training.objectives.distillation import worst_distance
from tightrope.training.objectives.divergence import divergence
from tightrope.training.settings import Settings
from tightrope.training.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")

RADIUS = 0.1


def run(net, objective, radius=RADIUS, taught=None, data=None):
    """Return the loss and its gradients, always from the same random points."""
    net = copy.deepcopy(net)
    x, y = data or reference.batch()
    torch.manual_seed(11)
    model = training_model(trace(net, reference.SHAPE), x)
    model.teacher = taught or teacher()
    loss = objective(model, x, y, radius)
    loss.value.backward()
    return loss, reference.gradients(net)


def points(net, objective, goal=None, radius=RADIUS):
    """Return the adversarial points of the same call."""
    x, y = reference.batch()
    torch.manual_seed(11)
    model = training_model(trace(copy.deepcopy(net), reference.SHAPE), x)
    return objective.points(model, x, y, radius, goal)


def assert_same(found, expected, tolerance=1e-9):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def kl(reference_logits, logits):
    """The mean over samples of the divergence, as torch has it."""
    own, p = logits.log_softmax(1), reference_logits.softmax(1)
    return F.kl_div(own, p, reduction="batchmean")


# --- the divergence ---------------------------------------------------------------------------


def test_the_divergence_goes_from_the_teacher_to_the_student():
    """0.9 ln(0.9 / 0.5) + 0.1 ln(0.1 / 0.5) = 0.3681; the other way round it is 0.5108."""
    given = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    even = torch.zeros(1, 2, dtype=torch.float64)
    assert divergence(given, even).item() == pytest.approx(0.3681, abs=5e-5)
    assert divergence(even, given).item() == pytest.approx(0.5108, abs=5e-5)


def test_the_gradient_of_the_divergence():
    torch.manual_seed(0)
    fixed, logits = torch.randn(5, 4).double(), torch.randn(5, 4).double().requires_grad_()
    weights = torch.rand(5).double()
    (divergence(fixed, logits) * weights).sum().backward()
    expected = weights[:, None] * (logits.detach().softmax(1) - fixed.softmax(1))
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(divergence(fixed, logits).mean(), kl(fixed, logits))
    torch.autograd.gradcheck(lambda t: divergence(fixed, t), [logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "objective",
    [
        ADCERT(alpha=0.0, steps=2),
        ADCERT(alpha=0.0, steps=2, imitate="rslad"),
        ADCERT(alpha=0.0, imitate="clean"),
        ADCERT(alpha=0.0, steps=2, teacher_input="adversarial", attack="teacher"),
        CCDist(alpha=0.3, steps=2),
        CCDist(alpha=0.0, steps=2, teacher_input="adversarial"),
    ],
    ids=str,
)
def test_of_itself_at_radius_zero_a_student_has_nothing_to_learn(objective, dtype):
    net = reference.norm_net().to(dtype).eval()
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in reference.batch())
    traced, found = trace(net, reference.SHAPE), []
    for weight in (5.0, 0.0):
        if isinstance(objective, CCDist):
            objective = CCDist(**{**vars(objective), "weight": weight})
        graph = traced.fold_batchnorm()
        model = FixedModel(graph, x)
        model.teacher = graph.detach()
        net.zero_grad()
        loss = objective(model, x, y, 0.0)
        loss.value.backward()
        found.append((loss.value.item(), reference.gradients(net)))
    if isinstance(objective, ADCERT):
        assert found[0][0] == 0
        assert all(not gradient.any() for gradient in found[0][1].values())
    else:  # the distance adds nothing to the loss of CC-IBP, and nothing to its gradient
        assert found[0][0] == found[1][0] > 0
        assert all(torch.equal(g, found[1][1][name]) for name, g in found[0][1].items())


# --- AD-CERT ----------------------------------------------------------------------------------


@pytest.mark.parametrize("imitate", ["adversarial", "rslad", "clean"])
@pytest.mark.parametrize("name", reference.NETS)
def test_all_weight_on_the_bounds_is_ibp(name, imitate):
    net, taught = reference.NETS[name](), teacher(name)
    expected, gradients = run(net, IBP())
    loss, found = run(net, ADCERT(alpha=1.0, steps=3, imitate=imitate), taught=taught)
    assert torch.equal(loss.value, expected.value)
    assert torch.equal(loss.robust, expected.robust)
    assert all(torch.equal(found[key], gradients[key]) for key in gradients)


@pytest.mark.parametrize("teacher_input", ["clean", "adversarial"])
@pytest.mark.parametrize("name", reference.NETS)
def test_adcert_by_formula(name, teacher_input):
    net, taught, alpha = reference.NETS[name](), teacher(name), 0.3
    x, y = reference.batch()
    objective = ADCERT(alpha=alpha, steps=3, teacher_input=teacher_input)
    loss, found = run(net, objective, taught=taught)
    attacked = points(net, objective)
    slow = reference.Reference(net, x)
    seen = attacked if teacher_input == "adversarial" else x
    bounds = slow.ibp_loss(x, y, RADIUS)
    value = alpha * bounds + (1 - alpha) * kl(taught(seen), slow.points(attacked))
    value.backward()
    torch.testing.assert_close(loss.value, value, rtol=1e-10, atol=1e-10)
    assert_same(found, reference.gradients(net))
    # No label is in the imitation: it calls robust what MTL-IBP does.
    assert loss.robust.tolist() == run(net, MTLIBP(alpha=alpha, steps=3))[0].robust.tolist()


def test_the_variants_of_adcert():
    net, taught = reference.norm_net(), teacher()
    x, _ = reference.batch()
    slow = reference.Reference(net, x)
    clean = kl(taught(x), slow.logits)
    natural = run(net, ADCERT(alpha=0.0, imitate="clean"), taught=taught)[0]
    torch.testing.assert_close(natural.value, clean)
    rslad = ADCERT(alpha=0.0, imitate="rslad", steps=3)
    away = points(net, rslad, Divergence(taught(x)))
    both = clean / 6 + 5 / 6 * kl(taught(x), slow.points(away))
    torch.testing.assert_close(run(net, rslad, taught=taught)[0].value, both)
    # Led away from the teacher, the attack finds what the student imitates least.
    by_labels = points(net, rslad)
    assert kl(taught(x), slow.points(away)) > kl(taught(x), slow.points(by_labels))


def test_rslad_attacks_the_imitation():
    assert ADCERT(imitate="rslad").attack == "teacher" and ADCERT().attack == "labels"
    settings = Settings.parse({"method": "ad-cert", "ad-cert.imitate": "rslad"})
    assert settings.options["attack"] == "teacher"


# --- CC-Dist ----------------------------------------------------------------------------------


def test_the_worst_distance_in_a_box():
    box = Box(torch.tensor([[-1.0, 2.0]]), torch.tensor([[3.0, 2.5]]))
    target = torch.tensor([[0.0, 2.4]])
    expected = (3.0**2 + 0.4**2) / 2
    assert worst_distance(box, target).tolist() == [pytest.approx(expected)]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["plain", "norm"])
def test_ccdist_by_formula(name, alpha):
    net, taught = reference.NETS[name](), teacher(name)
    x, y = reference.batch()
    objective = CCDist(alpha=alpha, steps=3)
    loss, found = run(net, objective, taught=taught)
    attacked = points(net, objective)
    body, last = net[:-1], net[-1]
    slow = reference.Reference(net, x)
    low, up = (x - RADIUS).clamp(min=0), (x + RADIUS).clamp(max=1)
    interval = (low, up)
    for layer in body:
        interval = slow._interval(layer, interval, [])
    features = attacked
    for layer in body:
        features = slow._points(layer, features)
    wanted = x
    for layer in reference.NETS[name](9).eval()[:-1]:
        wanted = layer(wanted)
    total = 0.0
    for n in range(len(x)):
        for j in range(features.shape[1]):
            ends = [(1 - alpha) * features[n, j] + alpha * end[n, j] for end in interval]
            total = total + max((e - wanted[n, j].detach()) ** 2 for e in ends)
    distance = total / len(x) / features.shape[1]
    outputs = last(features)
    margins = outputs.gather(1, y[:, None]) - outputs
    every, _, _ = slow.bounds(low, up)
    combined = alpha * every[torch.arange(len(y)), y] + (1 - alpha) * margins
    value = F.cross_entropy(-combined, y) + 5 * distance
    value.backward()
    torch.testing.assert_close(loss.value, value, rtol=1e-10, atol=1e-10)
    assert_same(found, reference.gradients(net))


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_without_the_distance_it_is_cc_ibp(alpha):
    net = reference.norm_net()
    loss, found = run(net, CCDist(alpha=alpha, steps=3, weight=0.0))
    expected, gradients = run(net, CCIBP(alpha=alpha, steps=3))
    torch.testing.assert_close(loss.value, expected.value, rtol=1e-12, atol=1e-12)
    assert loss.robust.tolist() == expected.robust.tolist()
    assert_same(found, gradients)


@pytest.mark.parametrize("name", reference.NETS)
def test_the_distance_grows_with_alpha(name):
    net, taught = reference.NETS[name](), teacher(name)

    def distance(alpha):
        ends = [
            run(net, CCDist(alpha=alpha, steps=3, weight=w), taught=taught)[0].value.item()
            for w in (1.0, 0.0)
        ]
        return ends[0] - ends[1]

    found = [distance(alpha) for alpha in (0.0, 0.1, 0.4, 0.8, 1.0)]
    assert found == sorted(found) and found[0] < found[-1]


def test_ccdist_needs_features():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU())
    graph = trace(net, (1, 2, 2))
    with pytest.raises(UserError, match=r"last linear layer .* use ad-cert"):
        CCDist().check(graph)
    ADCERT().check(graph)


# --- the teacher ------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [ADCERT(steps=3), CCDist(steps=3)], ids=str)
def test_a_step_leaves_the_teacher_alone(objective):
    net, given = reference.norm_net(), reference.norm_net(9).eval()
    before = copy.deepcopy(given.state_dict())
    taught = trace(given, reference.SHAPE).fold_batchnorm().detach()
    x, y = reference.batch()
    Step(trace(net, reference.SHAPE), objective, 0.1, teacher=taught)(x, y, 0.05, annealing=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in given.state_dict().items())
    assert all(p.grad is None for p in given.parameters())
    assert any(g.any() for g in reference.gradients(net).values())


def test_a_teacher_is_asked_with_its_running_statistics():
    net = reference.norm_net(9)
    net.train()(torch.rand(20, *reference.SHAPE).double())
    x, _ = reference.batch()
    expected = net.eval()(x)
    torch.testing.assert_close(trace(net, reference.SHAPE).fold_batchnorm().detach()(x), expected)


@pytest.mark.parametrize("objective", [ADCERT(), CCDist()], ids=str)
def test_without_a_teacher(objective):
    x, y = reference.batch()
    model = training_model(trace(reference.plain_net(), reference.SHAPE), x)
    with pytest.raises(UserError, match="there is no teacher to learn from: set teacher"):
        objective(model, x, y, 0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ad-cert", "ad-cert.alpha": 1.5}, "ad-cert.alpha must be between 0 and 1"),
        ({"method": "ad-cert", "ad-cert.imitate": "kl"}, "ad-cert.imitate must be one of"),
        ({"method": "ad-cert", "ad-cert.attack": "kl"}, "ad-cert.attack must be one of"),
        ({"method": "ad-cert", "ad-cert.teacher_input": "x"}, "teacher_input must be one of clean"),
        ({"method": "cc-dist", "cc-dist.weight": -1}, "cc-dist.weight must be at least 0"),
        ({"method": "cc-dist", "cc-dist.weight": math.inf}, "cc-dist.weight must be at least 0"),
    ],
)
def test_bad_options(given, message):
    with pytest.raises(UserError, match=message):
        Settings.parse(given)
