"""Changes of ONNX files that leave them files of ONNX."""

from __future__ import annotations

from random import Random

import onnx
from formats import SIZES, change_bytes
from mutations import TEXTS
from onnx import helper

_KINDS = (
    *("Relu", "Gemm", "MatMul", "Conv", "Loop", "If", "Scan", "Pad", "Expand", "Tile", "Resize"),
    *("ConstantOfShape", "Range", "Reshape", "Transpose", "MaxPool", "Softmax", "Nonsense"),
    *("Concat", "Split", "Gather", "Slice", "BatchNormalization", "Dropout", "PRelu", "Identity"),
)
_NUMBERS = (*SIZES[:10], -1, -(2**63), 3, 7)


def change_onnx(content: bytes, random: Random) -> bytes:
    """Change one thing in a network."""
    try:
        model = onnx.load_model_from_string(content)
        random.choice(_CHANGES)(model, random)
        return model.SerializeToString()
    except Exception:  # a change that is impossible, or a file that was changed before
        return change_bytes(content, random)


def _name(random: Random) -> str:
    return random.choice((*TEXTS[7:], "x", "h0", "w0", "\x1b[2J", "\u202e"))[:1000]


def _kind(model: onnx.ModelProto, random: Random) -> None:
    random.choice(model.graph.node).op_type = random.choice(_KINDS)


def _wiring(model: onnx.ModelProto, random: Random) -> None:
    node = random.choice(model.graph.node)
    names = [name for other in model.graph.node for name in (*other.input, *other.output)]
    names += ["", _name(random)]
    ends = node.input if node.input and random.random() < 0.7 else node.output
    ends[random.randrange(len(ends))] = random.choice(names)


def _attribute(model: onnx.ModelProto, random: Random) -> None:
    values = (
        *(random.choice(_NUMBERS), [random.choice(_NUMBERS)] * random.choice((1, 4, 10_000))),
        *(0.5, float("nan"), [1e38, -1e38], _name(random).encode("utf-8", "replace")),
    )
    names = ("axis", "axes", "pads", "kernel_shape", "strides", "dilations", "group", "alpha")
    names += ("transA", "transB", "auto_pad", "to", "perm", "ceil_mode", "value", "mode")
    attribute = helper.make_attribute(random.choice(names), random.choice(values))
    random.choice(model.graph.node).attribute.append(attribute)


def _constant(model: onnx.ModelProto, random: Random) -> None:
    tensor = random.choice(model.graph.initializer)
    action = random.random()
    if action < 0.4:
        del tensor.dims[:]
        tensor.dims.extend(random.choice(_NUMBERS) for _ in range(random.choice((0, 1, 2, 9))))
    elif action < 0.6:
        tensor.data_type = random.choice((0, 2, 6, 7, 8, 10, 11, 16, 17, 23, 99))
    elif action < 0.8:
        tensor.raw_data = random.choice((b"", b"\xff" * 8, b"\x00\x00\xc0\x7f" * 32))
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key = "location"
        entry.value = random.choice(("../outside/a.txt", "/etc/passwd", "/dev/zero", "pipe", ""))


def _shape(model: onnx.ModelProto, random: Random) -> None:
    ends = (*model.graph.input, *model.graph.output)
    dimensions = random.choice(ends).type.tensor_type.shape.dim
    if random.random() < 0.3 or not dimensions:
        dimensions.add().dim_value = random.choice(_NUMBERS)
    else:
        random.choice(dimensions).dim_value = random.choice(_NUMBERS)


def _more(model: onnx.ModelProto, random: Random) -> None:
    last = model.graph.node[-1].output[0]
    for i in range(random.choice((1, 50, 3000))):
        node = helper.make_node(random.choice(("Relu", "Identity", "Neg")), [last], [f"more{i}"])
        model.graph.node.append(node)
        last = f"more{i}"
    model.graph.output[0].name = last


def _extra(model: onnx.ModelProto, random: Random) -> None:
    """Add constants that nobody uses, twins, functions and other operator sets."""
    action = random.random()
    if action < 0.3:
        model.graph.initializer.append(model.graph.initializer[0])
    elif action < 0.5:
        size = random.choice(_NUMBERS)
        tensor = onnx.TensorProto(name="unused", data_type=1, dims=[abs(size), 4])
        model.graph.initializer.append(tensor)
    elif action < 0.7:
        model.opset_import[0].version = random.choice((-1, 0, 1, 7, 12, 25, 2**31, 2**62))
    elif action < 0.8:
        model.opset_import.add().domain = _name(random)
    elif action < 0.9:
        model.ir_version = random.choice((0, 3, 99, 2**40))
    else:
        random.choice((model.graph, model.graph.node[0])).name = _name(random)


_CHANGES = (_kind, _wiring, _attribute, _constant, _shape, _more, _extra)
