"""Places that depend on the input: what is gathered from there, or written there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_models import node, random_array, save_model

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.errors import UserError
from tightrope.nets.onnx.importing import OnnxNetwork, read_onnx

INT64 = onnx.TensorProto.INT64


def place(source: str, name: str) -> list[onnx.NodeProto]:
    """A whole number from zero on, of numbers in [0, 1]."""
    return [
        node("Mul", f"{source} {name}_size", f"{name}_scaled"),
        node("Floor", f"{name}_scaled", f"{name}_floor"),
        node("Clip", f"{name}_floor zero {name}_most", f"{name}_clipped"),
        node("Cast", f"{name}_clipped", name, to=INT64),
    ]


def sizes(**most: int) -> dict[str, np.ndarray]:
    found = {"zero": np.float32(0)}
    for name, count in most.items():
        found[f"{name}_size"] = np.float32(count + 0.9)
        found[f"{name}_most"] = np.float32(count)
    return found


HALVES = node("Split", "x", "a b", axis=1)
TABLE = random_array(4, 3)

# Nodes and constants; the input has twelve numbers, or as many as its shape says.
CASES = {
    "gather": ((1, 12), [HALVES, *place("b", "i"), node("Gather", "a i", axis=1)], sizes(i=5)),
    "gather from the end": (
        (1, 12), [HALVES, *place("b", "i"), node("Sub", "i six", "j"),
                  node("Gather", "a j", axis=1)],
        {**sizes(i=5), "six": np.array(6)},
    ),
    "gather from a table": (
        (1, 3), [*place("x", "i"), node("Gather", "t i")],
        {**sizes(i=3), "t": TABLE},
    ),
    "gather elements": (
        (2, 4), [HALVES, *place("b", "i"), node("GatherElements", "a i", axis=1)],
        sizes(i=1),
    ),
    "gather nd": (
        (2, 6), [HALVES, *place("b", "i"), node("Slice", "i s e axis", "j"),
                 node("GatherND", "a j")],
        {**sizes(i=1), "s": np.array([0]), "e": np.array([2]), "axis": np.array([1])},
    ),
    "scatter nd": (
        (2, 6), [HALVES, *place("b", "i"), node("Slice", "i s e axis", "j"),
                 node("ScatterND", "a j u")],
        {**sizes(i=1), "s": np.array([0]), "e": np.array([2]), "axis": np.array([1]),
         "u": np.float32([0.25, 3])},
    ),
    "scatter rows": (
        (4, 3), [node("Slice", "x s e axis", "b"), *place("b", "i"), node("ScatterND", "x i b3")],
        {**sizes(i=3), "s": np.array([1]), "e": np.array([2]), "axis": np.array([1]),
         "b3": random_array(4, 3)},
    ),
    "scatter elements": (
        (1, 12), [HALVES, *place("b", "i"), node("ScatterElements", "a i b", axis=1)], sizes(i=5),
    ),
    "scatter into a constant": (
        (1, 3), [*place("x", "i"), node("ScatterElements", "t i x", axis=1)],
        {**sizes(i=3), "t": random_array(1, 4)},
    ),
}  # fmt: skip


def made(name: str, folder: Path) -> OnnxNetwork:
    shape, nodes, constants = CASES[name]
    return read_onnx(save_model(folder / "net.onnx", nodes, shape, constants, opset=13))


@pytest.mark.parametrize("name", CASES)
def test_graph_and_file_agree_and_bounds_hold(name: str, tmp_path: Path) -> None:
    network = made(name, tmp_path)
    generator = torch.Generator().manual_seed(0)
    shape = network.input_shape
    points = torch.rand(200, *shape, generator=generator)
    # What is written twice at one place depends on an order that onnxruntime does not promise.
    found, expected = network.graph(points), network.run(points)
    assert torch.allclose(found, expected, atol=1e-5)
    lower = 0.7 * torch.rand(10, *shape, generator=generator)
    for width in (0.0, 0.05, 0.3):
        box = tr.Box(lower, lower + width)
        inside = lower[:, None] + width * torch.rand(10, 40, *shape, generator=generator)
        outputs = network.run(inside.flatten(0, 1)).view(10, 40, -1).double()
        for method in ("ibp", "crown-ibp", "crown"):
            bounds = tr.bounds(network.graph, box, method=method)
            assert bool((outputs >= bounds.lower[:, None] - 1e-5).all())
            assert bool((outputs <= bounds.upper[:, None] + 1e-5).all())
            if not width:
                assert bool((bounds.upper - bounds.lower < 1e-4).all())


def test_only_places_that_are_possible_count(tmp_path: Path) -> None:
    network = made("gather from a table", tmp_path)
    lower = torch.tensor([[0.4, 0.0, 0.7]])  # places 1 or 2; 0; 2 or 3
    bounds = tr.bounds(network.graph, tr.Box(lower, lower + 0.2), method="ibp")
    rows = [TABLE[1:3], TABLE[:1], TABLE[2:]]
    lowest = torch.from_numpy(np.concatenate([part.min(0) for part in rows]))
    highest = torch.from_numpy(np.concatenate([part.max(0) for part in rows]))
    assert torch.allclose(bounds.lower[0].float(), lowest)
    assert torch.allclose(bounds.upper[0].float(), highest)


def unlimited(folder: Path) -> Path:
    """A network that looks up places which may not be there."""
    nodes = [node("Floor", "x", "f"), node("Cast", "f", "i", to=INT64), node("Gather", "t i")]
    return save_model(folder / "net.onnx", nodes, (1, 1), {"t": np.float32([3, 5, 9])}, opset=13)


def test_networks_that_cannot_be_run_everywhere_are_asked_where_they_can(tmp_path: Path) -> None:
    path = unlimited(tmp_path)
    network = read_onnx(path)
    assert not network.batched
    assert network.run(torch.tensor([[1.5], [7.0]])).isnan().flatten().tolist() == [False, True]
    for low, verdict in ((2.5, Verdict.VERIFIED), (3.5, Verdict.FALSIFIED)):
        box = (torch.tensor([0.2]), torch.tensor([1.7]))
        asked = tr.within(torch.tensor([low]), torch.tensor([5.5]))
        assert tr.verify(path, box=box, spec=asked).verdict is verdict


def test_a_box_without_such_places_is_refused(tmp_path: Path) -> None:
    path = unlimited(tmp_path)
    with pytest.raises(UserError, match="looks up places that are not there"):
        box = (torch.tensor([5.0]), torch.tensor([6.0]))
        tr.verify(path, box=box, spec=tr.within(torch.tensor([0.0]), torch.tensor([1.0])))
