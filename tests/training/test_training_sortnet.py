"""SortNet's training: losses by hand, powers, means, parts; what it resumes and refuses."""

import math

import numpy as np
import pytest
import shared_steps
import torch
import torch.nn.functional as F
from torch import nn

import tightrope
from tightrope import nets
from tightrope.errors import UserError
from tightrope.graph import ops, trace
from tightrope.nets.distance import Bias, Distance, MeanShift, Nearest
from tightrope.training import distances
from tightrope.training.batchnorm import FixedModel, precise_batchnorm, training_model
from tightrope.training.distances import DistancePass
from tightrope.training.initialization import pass_on
from tightrope.training.objectives import SortNet
from tightrope.training.schedules import cosine
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (2, 4, 4)


def model_of(outputs, scale=1.0, **options):
    """Return a trained step's model that gives these (unscaled) outputs: a table of the inputs."""
    module = nn.Sequential(Distance(3, 3), Bias(3), Nearest()).double()
    with torch.no_grad():
        module[2].scale.fill_(scale)
    graph = trace(module, (3,))
    seen = torch.tensor(outputs, dtype=torch.float64, requires_grad=True)
    last = len(graph.nodes) - 1
    values = {last: scale * seen, last - 1: seen}
    return FixedModel(graph, seen, values[last], values=values, **options), seen


# --- losses -------------------------------------------------------------------------------------

OUTPUTS = [[1.0, 0.5, -1.0], [0.0, 0.1, 0.3]]
LABELS = torch.tensor([0, 1])


def test_hinge_by_hand():
    # e = 0.5: worst of sample 0 are 1 - 0.5 = 0.5 and 1 - 2 = -1; of sample 1, 1.1... and 1.2.
    model, seen = model_of(OUTPUTS)
    objective = SortNet(loss="hinge")
    loss = objective(model, model.x, LABELS, 0.5)
    one, two = [0.5, 0.0], [1 - 0.1, 1 + 0.2]
    expected = 0.75 * (0.5 + 1.2) / 2 + 0.25 * (sum(one) + sum(two)) / 6
    assert loss.value.item() == pytest.approx(expected)
    assert loss.robust is None  # at a finite power nothing is proved
    (slope,) = torch.autograd.grad(loss.value, seen)
    # Half a unit for each margin over 2 e, shared by 0.75 / 2 of the largest and 0.25 / 6 of all.
    large, small = 0.75 / 2, 0.25 / 6
    wanted = torch.tensor([[-large - small, large + small, 0.0], [small, -large - 2 * small, 0.0]])
    wanted[1, 2] = large + small
    torch.testing.assert_close(slope, wanted.double())


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_mixture_by_hand(progress):
    model, seen = model_of(OUTPUTS, scale=3.0, progress=progress)
    loss = SortNet(mixing=0.4, end_mixing=0.1)(model, model.x, LABELS, 0.5)
    weight = {0.0: 0.4, 0.5: 0.2, 1.0: 0.1}[progress]
    natural = F.cross_entropy(3 * seen, LABELS)
    # The largest term of sample 1 is 1.2, which counts as 1 and has no gradient.
    assert loss.value.item() == pytest.approx((0.5 + 1.0) / 2 + weight * natural.item())
    (slope,) = torch.autograd.grad(loss.value - weight * natural, seen)
    torch.testing.assert_close(slope, torch.tensor([[-0.5, 0.5, 0], [0, 0, 0]]).double())


def test_margins_count_from_twice_the_radius_in_units_of_the_normalisation():
    net = nets.build("linf-dist", SHAPE, 3, width=6, depth=2, normalize=((0.3,), (0.25,)))
    graph = trace(net.double().eval(), SHAPE)
    x, y = torch.rand(50, *SHAPE).double() * 0.5 + 0.25, torch.arange(50) % 3
    out = graph(x)
    wrong = out.masked_fill(F.one_hot(y, 3).bool(), -math.inf).amax(1)
    margin = out.gather(1, y[:, None])[:, 0] - wrong
    for radius in (0.01, 0.05):
        robust = SortNet()(FixedModel(graph, x), x, y, radius).robust
        assert torch.equal(robust, margin > 2 * radius / 0.25)
    assert robust.any() or (margin > 0.08).any()


def test_head_by_hand():
    module = shared_steps.NETS["head"]().eval()
    graph = trace(module, SHAPE)
    objective = SortNet(loss="head", mixing=0.1, end_mixing=0.1)
    x, y = torch.rand(5, *SHAPE).double(), torch.tensor([0, 1, 2, 0, 1])
    model = FixedModel(graph, x)
    loss = objective(model, x, y, 0.01)
    h = module[:-3](x)
    first, tanh, last = module[-3], module[-2], module[-1]
    center = first(h)
    spread = 0.01 / 0.5 * first.weight.abs().sum(1)
    low, high = tanh(center - spread), tanh(center + spread)
    upper = torch.full((5, 3), -math.inf, dtype=torch.float64)
    for i in range(5):
        for k in range(3):
            row = last.weight[k] - last.weight[y[i]]
            value = torch.where(row > 0, row * high[i], row * low[i]).sum()
            upper[i, k] = value + last.bias[k] - last.bias[y[i]] if k != y[i] else -math.inf
    right = module(x).argmax(1) == y
    robust = (right * (1 + upper.amax(1)).clamp(min=0)).mean()
    natural = F.cross_entropy(module(x), y)
    assert loss.value.item() == pytest.approx((robust + 0.1 * natural).item())
    assert torch.equal(loss.robust, upper.amax(1) < 0)


# --- the pass of a step -------------------------------------------------------------------------


def test_powers_grow_while_the_ramp_lasts():
    objective = SortNet(ramp_start=4, ramp_end=36)
    assert [objective.ramp(t, 40) for t in (0, 4, 12, 20, 36, 39.9)] == [0, 0, 0.25, 0.5, 1, 1]
    graph = trace(shared_steps.NETS["distances"](), SHAPE)
    found = [objective.own_pass(graph, r).power for r in (0.0, 0.25, 0.5, 0.999, 1.0)]
    assert found == [8, 28, 96, 1024, math.inf]  # of 8, 26.7, 89.4, 995, and infinity
    assert SortNet().ramp(3.9, 40) == 0 < SortNet().ramp(4.1, 40)
    assert SortNet().ramp(35.9, 40) < 1 == SortNet().ramp(36, 40)
    with pytest.raises(UserError, match="must be below sortnet"):
        SortNet(ramp_start=5, ramp_end=5)
    with pytest.raises(UserError, match="must both be 0, or neither"):
        SortNet(mixing=0.0)


def by_hand(module, x, power, chosen):
    """Return the outputs of a batch whose parts keep these inputs of each layer, and the means."""
    x, means, number = module[1](module[0](x)), [], 0
    layers = list(module)[2:]
    distances = [layer for layer in layers if isinstance(layer, Distance)]
    for layer in layers:
        if isinstance(layer, Distance):
            kept = chosen[number]
            rows = [x[part * 32 : part * 32 + 32][:, kept[part]] for part in range(len(kept))]
            parts = [
                (row[:, None] - layer.weight[:, kept[part]]).norm(power, dim=2)
                for part, row in enumerate(rows)
            ]
            x, number = torch.cat(parts), number + 1
        elif isinstance(layer, MeanShift):
            seen = torch.zeros_like(x, dtype=torch.bool)
            following = chosen[number] if number < len(distances) else None
            for part in range(len(following)):
                seen[part * 32 : part * 32 + 32, following[part]] = True
            mean = (x * seen).sum(0) / seen.sum(0).clamp(min=1)
            means.append((mean, seen.any(0)))
            x = x - mean
        else:
            x = layer(x)
    return x, means


@pytest.mark.parametrize("power", [8.0, 40.0])
def test_a_pass_keeps_the_inputs_that_were_drawn(power, monkeypatch):
    module = shared_steps.NETS["distances"]().train()
    drawn = []
    real = distances._draw

    def draw(op, total):
        drawn.append(real(op, total))
        return drawn[-1]

    monkeypatch.setattr(distances, "_draw", draw)
    torch.manual_seed(1)
    x = torch.rand(70, *SHAPE).double()
    graph = trace(module, SHAPE)
    before = [m.mean.clone() for m in module if isinstance(m, MeanShift)]
    last = len(graph.nodes) - 1
    found = DistancePass(power, (last,))(graph, x, torch.arange(70), 70)[last]
    assert [len(kept) for kept in drawn] == [3, 3, 3]
    assert {len(part) for part in drawn[0]} == {32}
    assert all(len({len(part) for part in kept}) == 1 for kept in drawn)
    assert any(not torch.equal(drawn[1][0], part) for part in drawn[1][1:])
    expected, means = by_hand(module, x, power, drawn)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    shifts = [m for m in module if isinstance(m, MeanShift)]
    for shift, old, (mean, seen) in zip(shifts, before, means, strict=True):
        moved = torch.where(seen, old + 0.1 * (mean - old), old)
        torch.testing.assert_close(shift.mean, moved.detach(), rtol=1e-7, atol=1e-9)


def test_so_many_inputs_are_kept_as_the_share_says():
    graph = trace(nets.build("sortnet", (400,), 3, width=400, depth=3, keep=70).eval(), (400,))
    op = graph.nodes[distances.distance_layers(graph)[1]].op
    assert distances.keep_of(op) == pytest.approx(0.7, abs=1e-6)
    torch.manual_seed(0)
    counts = [len(distances._draw(op, 64)[0]) for _ in range(200)]
    assert abs(sum(counts) / 200 - 280) < 3 and len(set(counts)) > 10
    places = torch.cat([part for _ in range(100) for part in distances._draw(op, 64)])
    often = torch.bincount(places, minlength=400) / 200
    assert often.min() > 0.5 and often.max() < 0.9
    rare = ops.Distance(torch.zeros(3, 4), torch.tensor([0.01, 0.01 * 0.99]) / 0.0199)
    assert {len(distances._draw(rare, 8)[0]) for _ in range(20)} == {1}  # one at least


def test_means_are_estimated_again_with_the_neuron_that_is_evaluated():
    module = shared_steps.NETS["distances"]()
    graph = trace(module, SHAPE)
    torch.manual_seed(2)
    batches = [(torch.rand(9, *SHAPE).double(), None) for _ in range(4)]
    precise_batchnorm(graph, batches)
    module.eval()
    first = torch.stack([module[2](module[1](module[0](x))).mean(0) for x, _ in batches])
    torch.testing.assert_close(module[3].mean, first.mean(0), rtol=1e-9, atol=0)
    second = []
    for (x, _), mean in zip(batches, first, strict=True):
        second.append(module[4](module[2](module[1](module[0](x))) - mean).mean(0))
    torch.testing.assert_close(module[5].mean, torch.stack(second).mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mixture", "hinge", "largest", "head"])
def test_parts_are_the_whole(name):
    objective, net, options = shared_steps.cases()[f"sortnet, {name}"]
    found = []
    for parts in (1, 2, 5):
        case = (objective, net, {**options, "accumulate": parts})
        found.append(shared_steps.step(case, None))
    for other in found[1:]:
        for kind in ("gradients", "buffers"):
            for key, value in found[0][kind].items():
                torch.testing.assert_close(other[kind][key], value, rtol=1e-9, atol=1e-12)
        assert other["sums"][1] == pytest.approx(found[0]["sums"][1])
    assert all(g.isfinite().all() for g in found[0]["gradients"].values())
    assert sum(bool(g.any()) for g in found[0]["gradients"].values()) >= 4


def test_gradients_of_a_step_are_true(one_thread):
    objective, net, _ = shared_steps.cases()["sortnet, mixture"]
    x, y = torch.rand(40, *SHAPE).double(), torch.arange(40) % 3

    def loss():
        torch.manual_seed(5)
        own = objective.own_pass(graph, 0.3)
        model = training_model(graph, x, own_pass=own)
        model.progress = 0.3
        return objective(model, x, y, 0.05).value

    module = shared_steps.NETS[net]()
    graph = trace(module, SHAPE)
    parameters = list(module.parameters())
    slopes = torch.autograd.grad(loss(), parameters)
    torch.manual_seed(6)
    ways = [torch.randn_like(p) for p in parameters]
    step = 1e-6
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, way in zip(parameters, ways, strict=True):
                p += sign * step * way
            ends.append(loss().item())
            for p, way in zip(parameters, ways, strict=True):
                p -= sign * step * way
    along = sum((s * way).sum().item() for s, way in zip(slopes, ways, strict=True))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(along, rel=1e-4)


# --- settings -----------------------------------------------------------------------------------


def test_distances_do_not_decay_and_the_scale_has_a_rate_of_its_own():
    settings = Settings(optimizer="adamw", weight_decay=0.02, beta2=0.99, optimizer_eps=1e-10)
    module = nets.build("sortnet", SHAPE, 3, width=6, depth=3)
    own = SortNet(scale_rate=0.2).groups(trace(module, SHAPE))
    optimizer = make_optimizer(module, settings, own)
    by_parameter = {p: g for g in optimizer.param_groups for p in g["params"]}
    assert len(by_parameter) == len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        group = by_parameter[parameter]
        assert group["betas"] == (0.9, 0.99) and group["eps"] == 1e-10
        assert group["weight_decay"] == (0.02 if "scale" in name else 0.0)
        assert group.get("share", 1.0) == (0.2 if "scale" in name else 1.0)
    head = nets.build("sortnet-mlp", SHAPE, 3, width=6, depth=4, hidden=5)
    groups = make_optimizer(head, settings, SortNet(loss="head").groups(trace(head, SHAPE)))
    decaying = [p for g in groups.param_groups if g["weight_decay"] for p in g["params"]]
    assert [p.shape for p in decaying] == [(5, 6), (5,), (3, 5), (3,)]


def test_the_rate_falls_as_a_cosine():
    assert [cosine(2.0, t) for t in (0, 0.5, 1)] == pytest.approx([2, 1, 0])


def test_layers_that_pass_their_inputs_on():
    net = nets.build("linf-dist", (5,), 3, width=7, depth=3)
    pass_on(trace(net, (5,)))
    x = torch.rand(4, 5)
    inner = net[1](net[0](x))
    torch.testing.assert_close(inner, (x + 10)[:, [0, 1, 2, 3, 4, 0, 1]])
    assert net[5].weight.abs().max() < 6  # fewer outputs than inputs: as they were


SMALL = {
    **{"data": "mnist", "train_samples": 96, "validation": 16, "batch_size": 48, "eps": 0.1},
    **{"net": "sortnet", "width": 12, "depth": 3, "method": "sortnet", "select": "last"},
    **{"optimizer": "adamw", "learning_rate": 0.02, "decay": "cosine", "normalize": True},
    **{"device": "cpu"},
}


def interrupted(epochs):
    class Stop(Exception):
        pass

    class Progress:
        def step(self, *_):
            pass

        def epoch(self, record):
            if record["epoch"] == epochs:
                raise Stop

    return Stop, Progress()


@pytest.mark.parametrize("net", ["sortnet", "sortnet-mlp"])
def test_resuming_is_as_if_it_had_never_stopped(net, tmp_path):
    options = {**SMALL, "net": net, "epochs": 4, "initialization": "identity"}
    if net == "sortnet-mlp":
        options |= {"hidden": 5, "sortnet": {"loss": "head"}}
    whole = tightrope.train(out=tmp_path / "whole", **options)
    stop, progress = interrupted(2)
    with pytest.raises(stop):
        tightrope.train(out=tmp_path / "parts", progress=progress, **options)
    parts = tightrope.train(out=tmp_path / "parts", resume=True)
    assert whole.weights.read_bytes() == parts.weights.read_bytes()
    assert [r["loss"] for r in whole.history()] == [r["loss"] for r in parts.history()]
    assert all(r["robust"] is None for r in whole.history())


def test_networks_are_selected_once_powers_are_infinite(tmp_path):
    own = {"ramp_start": 0, "ramp_end": 3}
    run = tightrope.train(
        out=tmp_path / "a", **{**SMALL, "epochs": 5, "select": "best", "sortnet": own}
    )
    checkpoint = torch.load(run.checkpoint, weights_only=True)
    assert checkpoint["selected_epoch"] >= 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"net": "cnn3", "depth": None}, "sortnet trains distance layers: set net to linf-dist"),
        ({"method": "ibp"}, "ibp cannot train distance layers: set method = sortnet"),
        ({"method": "taps"}, "taps cannot train distance layers: set method = sortnet"),
        ({"net": "sortnet-mlp"}, "ends in linear layers takes sortnet.loss = head"),
        ({"sortnet": {"loss": "head"}}, "ends in distances takes sortnet.loss = mixture or hinge"),
        ({"sam_rho": 0.1}, "sam_rho goes through a batch more than once, and sortnet draws"),
        ({"smoothing": "rgs"}, "smoothing goes through a batch more than once, and sortnet"),
        ({"edac_weight": 0.3}, "edac_weight goes through a batch more than once, and sortnet"),
        ({"tightness_weight": 0.1}, "linear layers and ReLUs, but this one has Distance"),
        ({"initialization": "shi"}, "shi is for ReLUs: sortnet takes identity"),
        ({"keep": 101}, "keep is a share of inputs in percent, from 1 to 100, got 101"),
        ({"net": "linf-dist", "keep": 70}, "'linf-dist' takes no 'keep'"),
        ({"net": "sortnet-mlp", "depth": 2}, "counts two linear layers: at least 3, got 2"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(changed, message, tmp_path):
    with pytest.raises(UserError, match=message):
        tightrope.train(out=tmp_path / "a", **{**SMALL, "epochs": 2, **changed})
    assert not (tmp_path / "a").exists()


def test_all_channels_are_normalised_by_one_deviation(tmp_path):
    x, y = torch.rand(64, 3, 4, 4), torch.arange(64) % 3
    x[:, 1] *= 0.3
    names = {"x_train": x, "y_train": y, "x_test": x[:9], "y_test": y[:9]}
    np.savez(tmp_path / "own.npz", **{name: t.numpy() for name, t in names.items()})
    own = {"data": str(tmp_path / "own.npz"), "epochs": 1, "train_samples": None}
    run = tightrope.train(out=tmp_path / "a", **{**SMALL, **own})
    module, architecture = nets.load(run.folder)
    mean, std = architecture.normalize
    assert len(mean) == 3 and len(std) == 1
    assert isinstance(module[0], nets.Normalize)


def test_steps_on_the_same_batch_lower_the_loss():
    objective, net, _ = shared_steps.cases()["sortnet, mixture"]
    module = shared_steps.NETS[net]()
    for layer in module:
        if isinstance(layer, Distance):
            layer.shares = torch.ones(1).double()  # nothing is dropped
    step = Step(trace(module, SHAPE), objective, 0.2, progress=0.0)
    x, y = torch.rand(32, *SHAPE).double(), torch.arange(32) % 3
    optimizer = torch.optim.Adam(module.parameters(), 0.03)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(step(x, y, 0.01, annealing=False).loss)
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
