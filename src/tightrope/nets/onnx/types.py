"""Integers and booleans in ONNX networks: which operators treat them like real numbers.

A graph computes with floating-point numbers only. That stands for whole numbers wherever an
operator computes the same of them; overflow of integers is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightrope.graph.values import refuse
from tightrope.nets.onnx.builder import Call, Value

# Numbers of `onnx.TensorProto` by the kind of type they are.
KINDS = {1: "f", 11: "f", 6: "i", 7: "i", 9: "b"}
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
LOGIC = ("Not", "And", "Or", "Xor")

# Operators of which whole numbers are nothing special.
WHOLE = {
    *COMPARISONS, *LOGIC, "Add", "Sub", "Mul", "Neg", "Abs", "Sign", "Max", "Min", "Clip", "Where",
    "Cast", "OneHot", "Identity", "Dropout", "Flatten", "Reshape", "Squeeze", "Unsqueeze",
    "Transpose", "Slice", "Gather", "GatherElements", "GatherND", "Split", "Concat", "Expand",
    "Tile", "Pad", "ReduceSum", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "MatMul", "Relu",
    "DequantizeLinear", "CumSum", "ScatterND", "ScatterElements", "Scatter", "Trilu", "Sum",
    "CastLike",
}  # fmt: skip


def result(operator: str, attributes: dict[str, Any], given: Sequence[str]) -> str:
    """Return the kind of an operator's results, given those of its inputs."""
    if operator in (*COMPARISONS, *LOGIC):
        return "b"
    if operator in ("ArgMax", "ArgMin", "QuantizeLinear"):
        return "i"
    if operator == "DequantizeLinear":
        return "f"
    if operator == "Cast":
        return KINDS.get(int(attributes.get("to", 0)), "f")
    place = {"Where": 1, "OneHot": 2, "CastLike": 1}.get(operator, 0)
    return given[place] if place < len(given) else "f"


def check(call: Call) -> None:
    """Refuse operators of whole numbers that are not those of real ones."""
    whole = any(isinstance(a, Value) and a.kind != "f" for a in call.inputs)
    refuse(whole and call.kind not in WHOLE, "integers or booleans that depend on the input")
