"""Certifying networks that were trained elsewhere, on samples of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tightrope as tr
from tightrope import nets
from tightrope.errors import UserError
from tightrope.runs import Run

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"steps": 5, "restarts": 1, "timeout": 20.0}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def samples(net: nn.Module, count: int = 12) -> tuple[Tensor, Tensor]:
    """Return inputs with the network's own labels but for every fourth one."""
    torch.manual_seed(1)
    x = torch.rand(count, 1, 2, 2)
    y = net(x).argmax(1)
    y[::4] = (y[::4] + 1) % 3
    return x, y


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    net = network()
    x, y = samples(net)
    nets.export_onnx(net, (1, 2, 2), tmp_path / "net.onnx")
    np.savez(tmp_path / "samples.npz", x_test=x[:, 0].numpy(), y_test=y.numpy())
    return tmp_path / "net.onnx", tmp_path / "samples.npz"


def test_a_module_and_tensors(tmp_path: Path) -> None:
    net = network().train()
    data = samples(net)
    found = tr.certify(net, data=data, eps=0.05, **OPTIONS)
    assert (found.samples, found.complete, found.natural) == (12, True, 0.75)
    assert list(tmp_path.iterdir()) == []  # nothing is written
    each = [
        tr.verify(net, x, int(label), eps=0.05, timeout=20).verdict
        for x, label in zip(*data, strict=True)
    ]
    assert (found.verified, found.falsified) == (each.count("verified"), each.count("falsified"))
    assert found.verified and found.falsified > 3
    graph = tr.trace(net, (1, 2, 2))
    again = tr.certify(graph, data=data, eps=0.05, out=tmp_path / "graph", **OPTIONS)
    assert (again.verified, again.falsified) == (found.verified, found.falsified)
    assert (tmp_path / "graph" / "certification.jsonl").exists()


def test_a_file_goes_on_where_it_stopped(files: tuple[Path, Path], tmp_path: Path) -> None:
    onnx, data = files
    out = tmp_path / "out"
    first = tr.certify(onnx, data=data, eps="0.05", samples=5, out=out, **OPTIONS)
    before = Run(out).journal.read_bytes()
    whole = tr.certify(str(onnx), data=str(data), eps=["0.02", "0.05"], out=out, **OPTIONS)
    assert Run(out).journal.read_bytes().startswith(before)
    assert (first.samples, whole.samples) == (5, 12)
    assert [point["samples"] for point in whole.curve] == [12, 12]
    plain = tr.certify(network(), data=samples(network()), eps=0.05, **OPTIONS)
    assert (whole.verified, whole.falsified) == (plain.verified, plain.falsified)
    page = tr.report(out)
    text = page.page.read_text()
    assert page.notices == () and "net.onnx" in text and "By radius" in text
    assert "The pictures are missing" not in text


def test_two_jobs(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightrope.certification import session

    monkeypatch.setattr(session, "BATCH", 6)
    monkeypatch.setattr(session, "SMALLEST_BATCH", 6)
    onnx, data = files
    one = tr.certify(onnx, data=data, eps=0.05, out=tmp_path / "one", **OPTIONS)
    two = tr.certify(onnx, data=data, eps=0.05, out=tmp_path / "two", jobs=2, **OPTIONS)
    assert (one.verified, one.falsified, one.unknown) == (two.verified, two.falsified, two.unknown)


def test_another_network_or_other_samples_are_refused(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    onnx, data = files
    out = tmp_path / "out"
    tr.certify(onnx, data=data, eps=0.05, samples=4, out=out, **OPTIONS)
    nets.export_onnx(network(7), (1, 2, 2), onnx)
    with pytest.raises(UserError, match=r"another network .* weights"):
        tr.certify(onnx, data=data, eps=0.05, out=out, **OPTIONS)
    nets.export_onnx(network(), (1, 2, 2), onnx)
    x, y = samples(network())
    np.savez(data, x_test=1 - x.numpy(), y_test=y.numpy())
    with pytest.raises(UserError, match="test sample 0 has another image"):
        tr.certify(onnx, data=data, eps=0.05, out=out, **OPTIONS)
    with pytest.raises(UserError, match=r"other settings \(domain\)"):
        tr.certify(onnx, data=data, eps=0.05, out=out, domain=None, **OPTIONS)
    module = network()
    module[1].weight.data[0, 0] += 1e-6
    for given in (network(7), module):
        folder = tmp_path / "module"
        tr.certify(network(), data=samples(network()), eps=0.05, samples=4, out=folder, **OPTIONS)
        with pytest.raises(UserError, match="another network"):
            tr.certify(given, data=samples(network()), eps=0.05, out=folder, **OPTIONS)


def test_samples_of_another_range() -> None:
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    x, y = torch.tensor([[3.0, -5.0], [0.5, 100.0]]), torch.tensor([0, 0])
    found = tr.certify(net, data=(x, y), eps=2, domain=None, **OPTIONS)
    assert (found.verified, found.falsified) == (1, 1)
    with pytest.raises(UserError, match="the samples must lie in"):
        tr.certify(net, data=(x, y), eps=2, domain=(-1.0, 1.0), **OPTIONS)


def test_double_precision() -> None:
    net = network().double()
    x, y = samples(network())
    found = tr.certify(net, data=(x, y), eps=0.05, **OPTIONS)
    assert found.complete and found.verified


NET = network()
X, Y = samples(NET)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": None}, "data is missing"),
    "no radius": ({"eps": None}, "eps is missing"),
    "one tensor": ({"data": X}, "data must be a pair"),
    "three": ({"data": (X, Y, Y)}, "data must be a pair"),
    "lengths": ({"data": (X, Y[:3])}, "12 samples but 3 labels"),
    "label": ({"data": (X, Y + 5)}, "a label 7, but the network has 3 outputs"),
    "negative": ({"data": (X, Y - 9)}, "negative label"),
    "fractions": ({"data": (X, Y.float())}, "must be integers"),
    "range": ({"data": (X * 3, Y)}, "outside"),
    "nan": ({"data": (X * float("nan"), Y)}, "not a number"),
    "words": ({"data": (["a"], [0])}, "must hold numbers"),
    "nothing": ({"data": (X[:0], Y[:0])}, "is empty"),
    "suffix": ({"data": "samples.csv"}, "must be an .npz file"),
    "file": ({"data": "missing.npz"}, "missing.npz does not exist"),
    "count": ({"samples": 13}, "samples must lie in"),
    "radius": ({"eps": 2}, "eps must lie in"),
    "domain": ({"domain": (1.0, 0.0)}, "domain must be a pair"),
    "weights": ({"run": NET.state_dict()}, "load the weights into a module first"),
    "shape": ({"run": tr.trace(nn.Linear(3, 2), (3,))}, r"shape \(1, 2, 2\), the network takes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    given = {"data": (X, Y), "eps": 0.05, "out": tmp_path / "out", **OPTIONS, **options}
    with pytest.raises(UserError, match=message) as caught:
        tr.certify(given.pop("run", NET), **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()  # nothing half-written


def test_folders_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        tr.certify(NET, data=(X, Y), eps=0.05, out=tmp_path / "file", **OPTIONS)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="holds a run of its own"):
        tr.certify(NET, data=(X, Y), eps=0.05, out=tmp_path, **OPTIONS)
    with pytest.raises(UserError, match="go with a network"):
        tr.certify(tmp_path, data=(X, Y), **OPTIONS)


def test_the_journal_is_that_of_any_run(tmp_path: Path) -> None:
    tr.certify(NET, data=(X, Y), eps=0.3, out=tmp_path / "out", **OPTIONS)
    run = Run(tmp_path / "out")
    records = [json.loads(line) for line in run.journal.read_text().splitlines()]
    broken = [r for r in records if "counterexample" in r]
    assert broken
    for record in broken:
        point = torch.from_numpy(np.load(run.folder / record["counterexample"]))
        assert float((point - X[record["index"]]).abs().max()) <= 0.3
        assert int(NET(point[None]).argmax()) != record["label"]
