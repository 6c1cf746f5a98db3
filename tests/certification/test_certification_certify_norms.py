"""`tr.certify` and `tr.attack` on l1 and l2 balls: verdicts, folders, curves and the page."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tightrope as tr
from tightrope.box import BallBox, Box, joined
from tightrope.certification.regions import distance
from tightrope.errors import UserError
from tightrope.runs import Run
from tightrope.runs.journal import Journal

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"steps": 10, "restarts": 1, "timeout": 20.0}
RADII = {"l1": ("0.1", "0.3"), "l2": ("0.05", "0.25")}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 3))


def samples(net: nn.Module, count: int = 16) -> tuple[Tensor, Tensor]:
    """Return inputs with the network's own labels but for the first one."""
    torch.manual_seed(1)
    x = torch.rand(count, 1, 3, 3)
    y = net(x).argmax(1)
    y[0] = (y[0] + 1) % 3
    return x, y


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_verdicts_are_those_of_verify(norm: str, tmp_path: Path) -> None:
    net = network()
    x, y = samples(net)
    radius = RADII[norm][1]
    found = tr.certify(net, data=(x, y), eps=radius, norm=norm, out=tmp_path, **OPTIONS)
    each = [
        tr.verify(net, image, int(label), eps=radius, norm=norm, timeout=20).verdict
        for image, label in zip(x, y, strict=True)
    ]
    assert (found.verified, found.falsified) == (each.count("verified"), each.count("falsified"))
    assert found.verified > 2 and found.falsified > 2 and not found.unknown
    box = tr.certify(net, data=(x, y), eps=radius, **OPTIONS)
    assert box.verified < found.verified  # the ball is smaller than the box around it
    known = Journal(Run(tmp_path).journal).read(range(16))
    points = [(r.index, r.counterexample) for r in known if r.counterexample is not None]
    assert points
    for index, name in points:
        point = torch.from_numpy(np.load(tmp_path / name))
        assert distance(x[index], point, {"l1": 1, "l2": 2}[norm]) <= Fraction(radius)
        assert int(net(point[None]).argmax()) != int(y[index])


def test_counterexamples_lie_in_the_ball_and_not_merely_in_its_box() -> None:
    """The classes differ in a corner of the box, which the ball does not reach."""
    net = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4]))
        net[0].bias.copy_(torch.tensor([0.0, -2.3]))  # reached if all inputs rise by 0.075
    data = (torch.full((3, 4), 0.5), torch.zeros(3, dtype=torch.long))
    counts = [
        (found.verified, found.falsified)
        for norm in ("linf", "l2", "l1")
        for found in [tr.certify(net, data=data, eps=0.1, norm=norm, **OPTIONS)]
    ]
    assert counts == [(0, 3), (3, 0), (3, 0)]


def test_a_folder_goes_on_with_its_own_norm_only(tmp_path: Path) -> None:
    net = network()
    data = samples(net)
    first = tr.certify(net, data=data, eps="0.25", norm=2, out=tmp_path, samples=6, **OPTIONS)
    assert first.settings["norm"] == "l2"
    before = Run(tmp_path).journal.read_bytes()
    for other in ("linf", "l1"):
        with pytest.raises(UserError, match=r"other settings \(norm\)"):
            tr.certify(net, data=data, eps="0.25", norm=other, out=tmp_path, **OPTIONS)
        assert Run(tmp_path).journal.read_bytes() == before
    radii = [*RADII["l2"], "1.5"]  # more than 1: the changes of many pixels add up
    whole = tr.certify(net, data=data, eps=radii, norm="l2", out=tmp_path, **OPTIONS)
    assert Run(tmp_path).journal.read_bytes().startswith(before)
    assert [point["eps"] for point in whole.curve] == radii
    shares = [point["certified"] for point in whole.curve]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    plain = tr.certify(net, data=data, eps="0.25", norm="l2", **OPTIONS)
    assert (whole.verified, whole.falsified) == (plain.verified, plain.falsified)
    page = tr.report(tmp_path)
    text = page.page.read_text()
    assert page.notices == ()
    assert "By radius (l2)" in text and "0.25 (l2)" in text and "radius ε (l2)" in text
    assert "full colour is its largest pixel" in text and "--norm l2" in text


def test_a_folder_of_the_usual_norm_does_not_name_it(tmp_path: Path) -> None:
    net = network()
    data = samples(net)
    tr.certify(net, data=data, eps=0.05, out=tmp_path, samples=3, **OPTIONS)
    assert "norm" not in json.loads(Run(tmp_path).certification.read_text())["settings"]
    again = tr.certify(net, data=data, eps=0.05, norm="inf", out=tmp_path, samples=3, **OPTIONS)
    assert again.samples == 3
    with pytest.raises(UserError, match=r"other settings \(norm\)"):
        tr.certify(net, data=data, eps=0.05, norm="l2", out=tmp_path, samples=3, **OPTIONS)


@pytest.mark.parametrize("norm", ["l3", 3, None, "", "L2 "])
def test_what_is_no_norm(norm: Any) -> None:
    net = network()
    with pytest.raises(UserError, match="norm must be linf, l2 or l1"):
        tr.certify(net, data=samples(net), eps=0.05, norm=norm, **OPTIONS)


def test_balls_are_joined_as_balls() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 5)
    balls = [
        BallBox(x[i : i + 1] - 1, x[i : i + 1] + 1, x[i : i + 1], Fraction(1, 2), 2)
        for i in range(2)
    ]
    both = joined(balls)
    assert isinstance(both, BallBox) and torch.equal(both.point, x)
    corner = x + 0.4  # of length 0.89
    assert both.contains(x).all() and not both.contains(corner).any()
    other = BallBox(x[:1] - 1, x[:1] + 1, x[:1], Fraction(1, 2), 1)
    for odd in (other, Box(x[:1], x[:1])):
        with pytest.raises(ValueError, match="no batch"):
            joined([balls[0], odd])
