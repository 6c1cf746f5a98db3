"""What an ONNX file consists of: odd, contradictory or elsewhere, it is read or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_models import node, random_array, save_model
from onnx_refusals import FLOATS, LIMIT, changed, ints, refused

from tightrope.errors import UserError
from tightrope.nets.onnx.importing import read_onnx

# --- what a file consists of ----------------------------------------------------------------


def test_an_endless_loop(tmp_path):
    body = helper.make_graph(
        [helper.make_node("Identity", ["cond"], ["again"]), helper.make_node("Relu", ["v"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("cond", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
        ],
    )
    path = tmp_path / "net.onnx"
    constants = {"t": np.array(True), "c": FLOATS}
    for start in ("x", "c"):  # with values, and among constants
        nodes = [node("Loop", f"- t {start}", "z", body=body), node("Add", "x z")]
        refused(save_model(path, nodes, (1, 5), constants), "Loop")
    # In a part that nothing depends on it is never run.
    read_onnx(
        save_model(
            path, [node("Loop", "- t c", "z", body=body), node("Relu", "x")], (1, 5), constants
        )
    )


def test_nodes_with_subgraphs(tmp_path):
    inner = helper.make_graph([], "inner", [], [])
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x", body=inner)], (1, 5))
    refused(path, "Relu (Relu_y) holds another graph")


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_standard_operators_defined_anew(domain, tmp_path):
    """onnxruntime may or may not use such a definition; the file is refused."""
    opsets = [helper.make_opsetid("", 13)]
    inner = [helper.make_node("Neg", ["X"], ["Y"])]
    function = helper.make_function(domain, "Relu", ["X"], ["Y"], inner, opsets)
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    changed(path, lambda model: model.functions.append(function))
    refused(path, "it defines standard operators anew: Relu")


def test_functions_with_other_names(tmp_path):
    opsets = [helper.make_opsetid("", 13)]
    inner = [helper.make_node("Neg", ["X"], ["Y"])]
    function = helper.make_function("mine", "Relu", ["X"], ["Y"], inner, opsets)

    def add(model):
        model.functions.append(function)
        model.opset_import.append(helper.make_opsetid("mine", 1))

    path = save_model(tmp_path / "net.onnx", [node("Relu", "x", domain="mine")], (1, 5))
    refused(changed(path, add), "mine.Relu (Relu_y)")
    path = save_model(path, [node("Relu", "x")], (1, 5))
    read_onnx(changed(path, add))  # not used


def test_several_versions_of_the_operators(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    changed(path, lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx", 9)))
    refused(path, "several versions of the operators: [9, 13]")


def test_training_and_sparse_constants(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    refused(changed(path, lambda m: m.training_info.add()), "training_info")
    save_model(path, [node("Relu", "x")], (1, 5))
    refused(changed(path, lambda m: m.graph.sparse_initializer.add()), "sparse_initializer")


def test_values_defined_twice(tmp_path):
    path = tmp_path / "net.onnx"
    nodes = [node("Relu", "x", "a"), node("Neg", "x", "a"), node("Relu", "a")]
    refused(save_model(path, nodes, (1, 5)), "defined more than once: a")
    save_model(path, [node("Add", "x c")], (1, 5), {"c": random_array(5)})
    refused(changed(path, lambda m: m.graph.initializer.append(m.graph.initializer[0])), ": c")
    nodes = [node("Neg", "x", "c"), node("Add", "x c")]
    refused(save_model(path, nodes, (1, 5), {"c": random_array(5)}), "more than once: c")
    save_model(path, [node("Relu", "x")], (1, 5))
    refused(changed(path, lambda m: m.graph.input.append(m.graph.input[0])), "more than once: x")
    save_model(path, [node("Relu", "x", "x"), node("Neg", "x", "y")], (1, 5))
    refused(path, "more than once: x")


def test_an_attribute_twice(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("LeakyRelu", "x", alpha=0.5)], (1, 5))
    again = helper.make_attribute("alpha", 0.25)
    changed(path, lambda m: m.graph.node[0].attribute.append(again))
    refused(path, "LeakyRelu (LeakyRelu_y) has an attribute twice")


def inconsistent(model) -> None:
    model.graph.initializer[0].dims[0] = 1000


@pytest.mark.parametrize("used", [True, False])
def test_constants_whose_data_do_not_fit(used, tmp_path):
    nodes = [node("Add", "x c")] if used else [node("Relu", "x")]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), {"c": random_array(5)})
    refused(changed(path, inconsistent), "the constant c: its data do not fit the shape (1000,)")


def test_constants_that_claim_to_be_huge(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5), {"c": random_array(5)})

    def claim(model):
        model.graph.initializer[0].dims[:] = [2**40, 2**22]

    refused(changed(path, claim), LIMIT)
    changed(path, lambda m: m.graph.initializer[0].dims.__setitem__(slice(None), [-5]))
    refused(path, "the constant c: shape (-5,)")


def test_names_that_are_no_text(tmp_path):
    path = save_model(tmp_path / "net.onnx", [node("Relu", "x")], (1, 5))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"Relu_y", b"Relu\xffy"))
    refused(path, "not UTF-8")
    path = save_model(
        path, [node("Conv", "x w", auto_pad="VALID")], (1, 1, 3, 3), {"w": random_array(1, 1, 1, 1)}
    )
    path.write_bytes(path.read_bytes().replace(b"VALID", b"VAL\xff\xff"))
    refused(path, "Conv (Conv_y: not understood")


def test_long_names_and_long_lists(tmp_path):
    long = "n" * 100_000
    nodes = [helper.make_node("Det", ["x"], ["v0"], name=long)]
    nodes += [helper.make_node("Det", [f"v{i}"], [f"v{i + 1}"], name=long) for i in range(200)]
    path = save_model(tmp_path / "net.onnx", nodes, (1, 5), output="v200")
    refused(path, "Det (nnn", "and 196 more")


ODD = {
    "axes twice": (node("Unsqueeze", "x a"), {"a": ints([0, 0])}),
    "an axis too far": (node("Unsqueeze", "x a"), {"a": ints([7])}),
    "no permutation": (node("Transpose", "x", perm=[0, 0]), {}),
    "an element too far": (node("Gather", "x i", axis=1), {"i": ints(5)}),
    "sizes below zero": (node("Reshape", "x s"), {"s": ints([-1, -5])}),
    "two free sizes": (node("Reshape", "x s"), {"s": ints([-1, -1])}),
    "a size that does not divide": (node("Reshape", "x s"), {"s": ints([-1, 3])}),
    "a shape of floats": (node("Reshape", "x s"), {"s": np.ones(2, np.float32)}),
    "no step": (
        node("Slice", "x a b c d"),
        {k: ints([i]) for k, i in zip("abcd", (0, 3, 1, 0), strict=True)},
    ),
    "half a pad": (node("Pad", "x p"), {"p": ints([0, 1, 0])}),
    "no slope": (node("PRelu", "x c"), {"c": np.ones(0, np.float32)}),
    "several bounds": (node("Clip", "x c"), {"c": random_array(5)}),
    "no inputs": (node("Concat", ""), {}),
    "an infinite factor": (node("Gemm", "x c", alpha=float("inf")), {"c": random_array(5, 3)}),
    "a strange type": (node("Add", "x c"), {"c": np.ones(5, np.float16)}),
    "no results": (node("Dropout", "x", "- y"), {}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments(name, tmp_path):
    operator, constants = ODD[name]
    if name == "no results":
        operator.output[0] = ""
    refused(save_model(tmp_path / "net.onnx", [operator], (1, 5), constants))


# --- data beside the file -------------------------------------------------------------------


def external(path: Path, **settings: str) -> Path:
    """Write a model whose constant lies in another file."""
    save_model(path, [node("Add", "x c")], (1, 5), {"c": np.arange(5, dtype=np.float32)})

    def move(model):
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in settings.items():
            tensor.external_data.add(key=key, value=value)

    return changed(path, move)


def test_data_beside_the_file(tmp_path):
    data = np.arange(7, dtype=np.float32).tobytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data.bin").write_bytes(data)
    path = external(tmp_path / "net.onnx", location="sub/data.bin", offset="8", length="20")
    shift = read_onnx(path).graph.nodes[1].op
    assert shift.offset.tolist() == [2, 3, 4, 5, 6]


def test_data_elsewhere(tmp_path):
    data = np.arange(5, dtype=np.float32).tobytes()
    (tmp_path / "secret").write_bytes(data)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "short").write_bytes(data[:8])
    path = folder / "net.onnx"
    for location in ("../secret", str(tmp_path / "secret"), "link", "", "a/../../secret", "x\\y"):
        refused(external(path, location=location), "data must lie beside it")
    refused(external(path, location="short"), "do not fit")
    refused(external(path, location="short", length="20"), "is shorter than")
    refused(external(path, location="short", offset="-4"), "data must lie beside it")
    refused(external(path, location="short", offset="four"), "data must lie beside it")
    with pytest.raises(UserError, match="cannot read"):
        read_onnx(external(path, location="missing"))


def test_endless_data(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_BYTES", "5000")
    (tmp_path / "data").write_bytes(bytes(6000))
    refused(external(tmp_path / "net.onnx", location="data"), "exceeds the limit of 5000 bytes")
