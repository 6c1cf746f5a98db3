"""What operators mean exactly where that is easily got wrong, and constants of the file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import node, random_array, save_model, scattered
from onnx_reference import evaluator

from tightrope.box import Box
from tightrope.deadline import Deadline, OutOfTimeError
from tightrope.errors import UserError
from tightrope.graph import ops
from tightrope.graph.same import same_outputs
from tightrope.nets.onnx import check as onnx_check
from tightrope.nets.onnx import constants as onnx_constants
from tightrope.nets.onnx import operators as onnx_operators
from tightrope.nets.onnx import structure as onnx_structure
from tightrope.nets.onnx.importing import OnnxNetwork, read_onnx

ints = np.array
IMAGE = (1, 2, 7, 8)


def agrees_with_the_reference(network: OnnxNetwork, path) -> None:
    import onnx

    x = scattered(network.input_shape).double()
    run = evaluator(onnx.load(path)).run
    (shape,) = network.reference.inputs.values()
    points = [sample.reshape(shape).numpy() for sample in x]
    outputs = [np.asarray(run(None, {"x": point})[0]).reshape(-1) for point in points]
    expected = torch.from_numpy(np.stack(outputs))
    same_outputs(network.graph.to(torch.float64), x, expected, what="the reference")


# --- windows --------------------------------------------------------------------------------

READ = {
    "pool same upper": ("MaxPool", {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3]}),
    "pool same upper, strides": (
        "MaxPool",
        {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 2], "strides": [2, 2]},
    ),
    "pool valid": ("MaxPool", {"auto_pad": "VALID", "kernel_shape": [3, 2], "dilations": [2, 3]}),
    "pool ceil": ("MaxPool", {"kernel_shape": [2, 3], "strides": [2, 3], "ceil_mode": 1}),
    "pool ceil, pads, dilations": (
        "MaxPool",
        {
            "kernel_shape": [3, 2],
            "strides": [3, 3],
            "ceil_mode": 1,
            "pads": [1, 1, 1, 1],
            "dilations": [2, 2],
        },
    ),
    "average ceil": (
        "AveragePool",
        {"kernel_shape": [3, 3], "strides": [3, 3], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
    ),
    "average ceil, counted": (
        "AveragePool",
        {
            "kernel_shape": [3, 2],
            "strides": [3, 3],
            "ceil_mode": 1,
            "pads": [1, 0, 1, 0],
            "count_include_pad": 1,
        },
    ),
    "average same upper": (
        "AveragePool",
        {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3], "count_include_pad": 1},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_windows_lie_where_the_specification_says(name, tmp_path):
    kind, attributes = READ[name]
    nodes = [node("Relu", "x", "r"), node(kind, "r", **attributes)]
    path = save_model(tmp_path / "net.onnx", nodes, IMAGE)
    agrees_with_the_reference(read_onnx(path), path)


REFUSED = {
    # onnxruntime does something else than the specification, or its reference implementation
    "pool same lower": ("MaxPool", {"auto_pad": "SAME_LOWER", "kernel_shape": [2, 2]}),
    "pool same, dilations": (
        "MaxPool",
        {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3], "dilations": [2, 2]},
    ),
    "pool valid, ceil": (
        "MaxPool",
        {"auto_pad": "VALID", "kernel_shape": [2, 2], "strides": [2, 3], "ceil_mode": 1},
    ),
    "gaps": ("MaxPool", {"auto_pad": "SAME_UPPER", "kernel_shape": [1, 1], "strides": [3, 3]}),
    "both": ("MaxPool", {"auto_pad": "VALID", "kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}),
    "average same, dilations": (
        "AveragePool",
        {"auto_pad": "SAME_UPPER", "kernel_shape": [2, 2], "dilations": [2, 2]},
    ),
    # there is no operation for it
    "average with dilations": ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 2]}),
    "too large": ("AveragePool", {"kernel_shape": [9, 2]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_windows_on_which_programs_disagree_are_refused(name, tmp_path):
    kind, attributes = REFUSED[name]
    opset = 21 if "dilations" in attributes else 13
    path = save_model(tmp_path / "net.onnx", [node(kind, "x", **attributes)], IMAGE, opset=opset)
    with pytest.raises(UserError, match=rf"{kind} \({kind}_y: "):
        read_onnx(path)


# --- broadcasts and axes --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 1), (3, 5), (2, 1, 5), (1, 1, 1)])
def test_slopes_that_repeat_the_value_are_refused(shape, tmp_path):
    """One slope for all, but in a shape that makes more numbers (or dimensions) of the value."""
    slopes = {"s": np.full(shape, 0.25, np.float32)}
    path = save_model(tmp_path / "net.onnx", [node("PRelu", "x s")], (1, 5), slopes)
    with pytest.raises(UserError, match="PRelu"):
        read_onnx(path)


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 5), ()])
def test_slopes_that_do_not(shape, tmp_path):
    slopes = {"s": np.full(shape, 2.5, np.float32)}
    path = save_model(tmp_path / "net.onnx", [node("PRelu", "x s")], (1, 5), slopes)
    network = read_onnx(path)
    assert network.graph.nodes[1].op == network.graph.nodes[-1].op
    agrees_with_the_reference(network, path)


SHAPES = {
    "flatten 0": (13, node("Flatten", "x", axis=0), {}),
    "flatten last": (13, node("Flatten", "x", axis=-1), {}),
    "reshape 0": (13, node("Reshape", "x s"), {"s": ints([0, 0, -1])}),
    "slice from the end": (
        13,
        node("Slice", "x s e a"),
        {"s": ints([-3, -100]), "e": ints([-1, 2**62]), "a": ints([-1, -2])},
    ),
    "gather from the end": (13, node("Gather", "x i", axis=-1), {"i": ints([-2, -1])}),
    "sum of nothing": (13, node("ReduceSum", "x a", noop_with_empty_axes=1), {"a": ints([], int)}),
    "sum of all": (13, node("ReduceSum", "x a"), {"a": ints([], int)}),
    "mean of nothing": (18, node("ReduceMean", "x", noop_with_empty_axes=1), {}),
    "empty range": (
        13,
        node("Clip", "x a b"),
        {"a": np.array(0.5, np.float32), "b": np.array(-0.25, np.float32)},
    ),
    "several limits": (13, node("Min", "x a b"), {"a": random_array(8), "b": random_array(7, 1)}),
    "one value": (13, node("Max", "x"), {}),
    "steep": (13, node("LeakyRelu", "x", alpha=2.5), {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_axes_and_limits(name, tmp_path):
    opset, operator, constants = SHAPES[name]
    path = save_model(tmp_path / "net.onnx", [operator], IMAGE, constants, opset=opset)
    agrees_with_the_reference(read_onnx(path), path)


def test_empty_lists_of_axes_on_which_programs_disagree(tmp_path):
    path = save_model(tmp_path / "n.onnx", [node("Squeeze", "x a")], IMAGE, {"a": ints([], int)})
    with pytest.raises(UserError, match=r"Squeeze \(Squeeze_y: a list of no axes"):
        read_onnx(path)


def test_padding_that_onnxruntime_merges_into_a_pool_is_refused(tmp_path):
    """It pads with nothing then, instead of zeros: the file is not what it runs."""
    nodes = [node("Pad", "x p", "a"), node("MaxPool", "a", kernel_shape=[2, 2])]
    pads = {"p": ints([0, 0, 1, 1, 0, 0, 0, 0])}
    path = save_model(tmp_path / "net.onnx", nodes, IMAGE, pads)
    with pytest.raises(UserError, match="the graph differs from onnxruntime in its outputs"):
        read_onnx(path)


def test_double_precision_is_double_precision(tmp_path):
    """onnxruntime, when it is free to, rounds the factor of a product to single precision."""
    constants = {"c": np.array(0.1), "w": np.random.default_rng(0).normal(size=(5, 4))}
    nodes = [node("Mul", "x c", "a"), node("MatMul", "a w")]
    path = save_model(tmp_path / "n.onnx", nodes, (1, 5), constants, kind=TensorProto.DOUBLE)
    network = read_onnx(path)
    x = torch.rand(1, 5, dtype=torch.float64)
    assert torch.allclose(network.run(x), network.graph(x), rtol=1e-14, atol=0)


# --- constants ------------------------------------------------------------------------------


def test_constants_are_those_of_onnxruntime(tmp_path):
    """A product of constants is rounded once, to the file's precision, as when the file runs."""
    a, b = random_array(5, seed=1), random_array(5, seed=2)
    nodes = [node("Mul", "a b", "c"), node("Sqrt", "d", "s"), node("Div", "c s", "e")]
    nodes.append(node("Add", "x e"))
    constants = {"a": a, "b": b, "d": np.array(2, np.float32)}
    network = read_onnx(save_model(tmp_path / "net.onnx", nodes, (1, 5), constants))
    expected = (a * b) / np.sqrt(np.float32(2))
    assert np.array_equal(network.graph.nodes[1].op.offset.numpy().reshape(-1), expected)


def computed(tmp_path, nodes, constants, opset: int = 13) -> np.ndarray:
    """Return the constant `c` of a file as it is added to the input."""
    path = save_model(
        tmp_path / "net.onnx", [*nodes, node("Add", "x c")], (1, 4), constants, opset=opset
    )
    return read_onnx(path).graph.nodes[1].op.offset.numpy().reshape(-1)


FLOAT = {"to": TensorProto.FLOAT}
FOUR = np.arange(4, dtype=np.float32)
COMPUTED = {
    "range": ([node("Range", "a b s", "r"), node("Cast", "r", "c", **FLOAT)], [2, 5, 8, 11]),
    "expanded": ([node("Expand", "h f", "c")], [0.5] * 4),
    "tiled": ([node("Tile", "p t", "c")], [1, 2, 1, 2]),
    "backwards": ([node("Slice", "q m n z m", "c")], [3, 2, 1, 0]),
    "chosen": ([node("Gather", "q i", "c")], [3, 0, 3, 1]),
    "padded": ([node("Pad", "p w", "c")], [0, 1, 2, 0]),
    "larger": ([node("Greater", "q h", "g"), node("Where", "g q h", "c")], [0.5, 1, 2, 3]),
    "integers": (
        [node("Mul", "i i", "j"), node("Div", "j t", "k"), node("Cast", "k", "c", **FLOAT)],
        [4, 0, 4, 0],
    ),
    "filled": (
        [node("ConstantOfShape", "f", "c", value=numpy_helper.from_array(np.ones(1, np.float32)))],
        [1] * 4,
    ),
    "list": ([node("Constant", "", "c", value_floats=[1.0, 2.0, 3.0, 4.0])], [1, 2, 3, 4]),
    "product": ([node("MatMul", "d q", "c")], [0, 2, 4, 6]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_constants_amount_to(name, tmp_path):
    nodes, expected = COMPUTED[name]
    constants = {
        **{"a": ints(2), "b": ints(12), "s": ints(3), "h": np.full(1, 0.5, np.float32)},
        **{"f": ints([4]), "p": np.array([1, 2], np.float32), "t": ints([2]), "q": FOUR},
        **{"m": ints([-1]), "n": ints([-(2**62)]), "z": ints([0]), "i": ints([3, 0, 3, 1])},
        **{"w": ints([1, 1]), "d": 2 * np.eye(4, dtype=np.float32)},
    }
    used = {given for operator in nodes for given in operator.input}
    constants = {key: value for key, value in constants.items() if key in used}
    assert computed(tmp_path, nodes, constants).tolist() == expected


def test_nothing_is_computed_before_every_operator_is_accepted(tmp_path, monkeypatch):
    nodes = [node("Mul", "c c", "d"), node("Add", "x d", "a"), node("Det", "a")]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), {"c": random_array(5)})
    calls = []
    monkeypatch.setattr(onnx_constants, "compute_node", lambda *given: calls.append(given))
    with pytest.raises(UserError, match="Det"):
        read_onnx(path)
    assert not calls


def test_operators_of_constants_are_on_a_list(tmp_path):
    for kind in ("Loop", "If", "Scan", "RandomNormal", "Unique", "TopK", "Optional"):
        assert kind not in onnx_constants.OPERATORS
        assert kind not in onnx_operators.CONVERTERS
    nodes = [node("Unique", "c", "d"), node("Cast", "d", "e", **FLOAT), node("Add", "x e")]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), {"c": random_array(5)})
    with pytest.raises(UserError, match=r"Unique \(Unique_d\)"):
        read_onnx(path)
    assert set(onnx_structure.SHAPES) == {"Shape", "Size"}


# --- the property's own box -----------------------------------------------------------------


def only_far_away(tmp_path, monkeypatch) -> OnnxNetwork:
    """Return a network whose graph is wrong only where some input exceeds 5,000."""
    nodes = [node("Clip", "x l h")]
    limits = {"l": np.array(-5000, np.float32), "h": np.array(5000, np.float32)}
    monkeypatch.setitem(onnx_operators.CONVERTERS, "Clip", lambda build, call: call.value())
    return read_onnx(save_model(tmp_path / "net.onnx", nodes, (1, 5), limits))


def box(lower: float, upper: float) -> Box:
    return Box(torch.full((1, 5), lower).double(), torch.full((1, 5), upper).double())


def test_the_check_looks_into_the_box(tmp_path, monkeypatch):
    network = only_far_away(tmp_path, monkeypatch)
    network.check([box(0, 1), box(-4000, 4000)])
    network.check([])
    for boxes in ([box(0, 6000)], [box(-6000, 0), box(0, 1)], [*[box(0, 1)] * 500, box(0, 9e3)]):
        with pytest.raises(UserError, match="the graph differs from onnxruntime"):
            network.check(boxes)
    with pytest.raises(OutOfTimeError):
        network.check([box(0, 1)], Deadline.after(0))


def test_many_boxes_take_no_more_points_than_one(tmp_path, monkeypatch):
    network = only_far_away(tmp_path, monkeypatch)
    seen = []
    original = onnx_check.Checker._values

    def watched(self, points):
        seen.append(len(points))
        return original(self, points)

    monkeypatch.setattr(onnx_check.Checker, "_values", watched)
    network.check([box(0, 1)])
    assert sum(seen) == onnx_check.MOST_POINTS
    seen.clear()
    network.check([box(0, 1)] * 1000)
    assert 0 < sum(seen) <= onnx_check.MOST_POINTS


def test_large_networks_are_checked_at_few_points(tmp_path, monkeypatch):
    path = save_model(
        tmp_path / "net.onnx", [node("MatMul", "x w")], (1, 100), {"w": random_array(100, 100)}
    )
    assert read_onnx(path).checker.count == onnx_check.MOST_POINTS
    monkeypatch.setattr(onnx_check, "PRODUCTS", 50_000)
    checker = read_onnx(path).checker
    assert checker.count == onnx_check.LEAST_POINTS
    monkeypatch.setattr(onnx_check, "PRODUCTS", 2**29)
    monkeypatch.setattr(onnx_check, "KEPT_ELEMENTS", 300)
    checker = read_onnx(path).checker
    assert checker.count == onnx_check.MOST_POINTS and checker.chunk == 1


def test_batches_that_mix_samples_are_noticed(tmp_path):
    """A sum over the batch, beside an output of 1e9."""
    mask = np.zeros(5, np.float32)
    mask[0] = 1e9
    nodes = [
        node("ReduceMean", "x", "m", axes=[0]),
        node("Sub", "x m", "d"),
        node("Add", "d x", "e"),
        node("Add", "e c"),
    ]
    path = save_model(tmp_path / "net.onnx", nodes, ("n", 5), {"c": mask})
    network = read_onnx(path)
    assert not network.batched
    x = torch.rand(4, 5)
    assert torch.allclose(network.run(x), network.graph(x))


def test_a_model_with_a_note_is_the_same_model(tmp_path):
    """What has no influence on the output is left out: notes, declared shapes, functions."""
    import onnx

    path = save_model(tmp_path / "net.onnx", [node("Relu", "x", "a"), node("Neg", "a")], (1, 5))
    model = onnx.load(path)
    model.doc_string = "a note"
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [7, 7]))
    onnx.save(model, path)
    kinds = [type(n.op) for n in read_onnx(path).graph.nodes]
    assert kinds == [ops.Input, ops.Relu, ops.Scale]
