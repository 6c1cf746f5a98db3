"""Distance nets through the commands: certified by Lipschitz constants, exported, attacked."""

import math

import pytest
import torch

import tightrope as tr
from tightrope import nets
from tightrope.answer import Verdict
from tightrope.certification.names import DEFAULT_STAGES, DISTANCE_STAGES
from tightrope.nets import export_onnx

pytestmark = pytest.mark.usefixtures("one_thread")


def near_prototypes(name="sortnet", keep=70):
    """Return a net whose last layer measures distances to what some inputs become, and those."""
    torch.manual_seed(1)
    options = {} if name == "linf-dist" else {"keep": keep}
    net = nets.build(name, (1, 6, 6), 4, width=24, depth=3, normalize=((0.5,), (0.25,)), **options)
    x = torch.rand(12, 1, 6, 6)
    net.eval()
    with torch.no_grad():
        net[-3].weight.copy_(net[:-3](x[:4]))
    return net, x, net(x).argmax(1)


@pytest.mark.parametrize("name", ["sortnet", "linf-dist"])
def test_certify_proves_by_the_lipschitz_stage(name):
    net, x, y = near_prototypes(name)
    assert y[:4].tolist() == [0, 1, 2, 3]
    found = tr.certify(net, data=(x, y), eps=0.01, steps=5, restarts=1)
    assert tuple(found.settings["stages"]) == DISTANCE_STAGES
    assert found.verified >= 4 and found.stages["lipschitz"]["verified"] >= 4
    # The margin of a prototype is its distance to the nearest other one.
    out = net(x)
    margins = out.gather(1, y[:, None]) - out
    worst = margins.scatter(1, y[:, None], math.inf).amin(1)
    expected = int((worst > 2 * 0.01 / 0.25).sum())
    assert found.stages["lipschitz"]["verified"] == expected
    # Boxes that are cut off at 0 and 1 are smaller.
    assert found.verified >= expected and found.falsified + found.unknown + found.verified == 12


def test_a_margin_of_twice_the_radius_is_what_it_takes():
    net, x, y = near_prototypes("linf-dist")
    out = net.double()(x.double())
    worst = (out.gather(1, y[:, None]) - out).scatter(1, y[:, None], math.inf).amin(1)
    radius = worst[0].item() * 0.25 / 2
    for factor, proved in ((0.999, True), (1.001, False)):
        found = tr.certify(
            net,
            data=(x[:1].double(), y[:1]),
            eps=round(radius * factor, 9),
            domain=None,
            stages=("lipschitz",),
        )
        assert found.verified == proved


def test_verify_and_bounds_know_distance_nets():
    net, x, y = near_prototypes()
    answer = tr.verify(net, x[0], int(y[0]), eps=0.005, timeout=30)
    assert answer.verdict is Verdict.VERIFIED and answer.stage == "lipschitz"
    other = (int(y[0]) + 1) % 4
    wrong = tr.verify(net, x[0], other, eps=0.005, timeout=30)
    assert wrong.verdict is Verdict.FALSIFIED
    spec = tr.argmax(int(y[0]))
    assert tr.verify(net, x[0], eps=0.005, spec=spec, timeout=30).verdict is Verdict.VERIFIED
    for method in ("ibp", "crown-ibp", "crown", "zonotope"):
        box = tr.bounds(net, x[:2], eps=0.01, method=method)
        assert (box.lower <= net(x[:2])).all() and (net(x[:2]) <= box.upper).all()


def test_other_networks_keep_their_stages():
    net = nets.build("cnn3", (1, 6, 6), 4, width=1).eval()
    x = torch.rand(2, 1, 6, 6)
    found = tr.certify(net, data=(x, net(x).argmax(1)), eps=1e-5, steps=2, restarts=1)
    assert tuple(found.settings["stages"]) == DEFAULT_STAGES
    idle = tr.certify(net, data=(x, net(x).argmax(1)), eps=1e-5, stages=("lipschitz", "ibp"))
    assert idle.stages["lipschitz"]["verified"] == 0


@pytest.mark.parametrize("name", ["sortnet", "linf-dist"])
def test_export_computes_the_same_and_can_be_read_back(name, tmp_path):
    pytest.importorskip("onnxruntime")
    net, x, _ = near_prototypes(name)
    path = tmp_path / "net.onnx"
    assert export_onnx(net, (1, 6, 6), path) < 1e-5
    assert not any(getattr(layer, "composed", False) for layer in net)  # a copy was exported
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    theirs = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(theirs, net(x), rtol=1e-5, atol=1e-5)
    if name == "linf-dist":  # of sorting, the reader knows nothing
        box = tr.bounds(path, x[:1], eps=0.01, method="ibp")
        ours = tr.bounds(net, x[:1], eps=0.01, method="ibp")
        # What it reads is made of smaller parts, whose boxes are wider.
        assert (box.lower <= ours.lower + 1e-6).all() and (box.upper >= ours.upper - 1e-6).all()
        assert (box.upper - box.lower).max() < 1


def test_export_of_a_head(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(1)
    net = nets.build("sortnet-mlp", (1, 6, 6), 4, width=24, depth=4, keep=70, hidden=5).eval()
    path, x = tmp_path / "net.onnx", torch.rand(5, 1, 6, 6)
    assert export_onnx(net, (1, 6, 6), path) < 1e-5
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    theirs = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(theirs, net(x), rtol=1e-5, atol=1e-5)
