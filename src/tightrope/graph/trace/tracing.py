"""From an `nn.Module` to a `Graph`.

`capture` records the operators that the module runs; each of those that Tightrope knows has one
small converter in the table at the end of `converters.py`. Everything that has none is collected,
so that the error names every unsupported layer at once. Then the graph is compared with the module
(`same.py`).
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from tightrope.box import Box
from tightrope.errors import UserError, shorten
from tightrope.graph import evaluate, ops
from tightrope.graph.graph import Graph, Node, prune
from tightrope.graph.same import box_points, general_points, same_function
from tightrope.graph.trace import converters
from tightrope.graph.trace.capture import Captured, capture, evaluating
from tightrope.graph.trace.reference import Reference
from tightrope.graph.trace.rehearsal import first_line, title
from tightrope.graph.trace.steps import WHOLE
from tightrope.graph.values import (
    Apply,
    Composed,
    Computed,
    Layered,
    Masked,
    Unsupported,
    Value,
    is_live,
)

# Types in which some operators compute with more precise constants than others.
HALF = (torch.float16, torch.bfloat16)
MOST_NAMED = 5  # parts in a refusal
# Operators whose results depend on the shape of their first argument alone.
_OF_SHAPES = tuple(
    getattr(torch.ops.aten, name)
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
# Where operations hold plain numbers that they compute with.
_NUMBERS: dict[type[ops.Op], tuple[str, ...]] = {
    ops.BatchNorm: ("epsilon",),
    ops.LeakyRelu: ("slope",),
    ops.Pad: ("value",),
    ops.Standardize: ("epsilon",),
}


def trace(
    module: nn.Module,
    input_shape: tuple[int, ...],
    *,
    box: Box | None = None,
    frozen: bool = False,
) -> Graph:
    """Turn `module` into a graph of operations that Tightrope can bound and attack.

    `input_shape` is the shape of one sample, e.g. `(3, 32, 32)`. The graph shares the
    module's parameters: move the module to its device first, then trace it. Dropout is
    the identity, BatchNorm uses its running statistics, as in evaluation. The graph is compared
    with the module at many points, and at points of `box` (a batch of one) if that is given.

    Weights that are computed from parameters (weight norm, spectral norm) would not follow them;
    with `frozen` the graph keeps what they are now, as everything that is proved does.
    """
    input_shape = _checked(module, input_shape)
    captured = capture(module, input_shape, None if box is None else box.lower)
    builder = _Builder(captured, frozen)
    for node in captured.operators.nodes:
        builder.visit(node)
    graph, shown = builder.finish()
    count = len(captured.probe)
    points = [general_points(input_shape, count, captured.probe)]
    if box is not None:
        points.append(box_points(box, count).to(captured.probe))
    with evaluating(module):
        reference = Reference(captured, shown, len(graph.nodes) - 1)
        reference.check_attention()
        for batch in points:
            same_function(graph, reference, batch, what=title(module))
        reference.check_state()
    return graph


def _checked(module: Any, input_shape: Any) -> tuple[int, ...]:
    """Return the shape of one sample; refuse what is no module or no shape."""
    if not isinstance(module, nn.Module):
        kind = module.__name__ if isinstance(module, type) else type(module).__name__
        raise UserError(f"the network must be an nn.Module, got {kind}")
    sizes = tuple(input_shape) if isinstance(input_shape, tuple | list) else None
    if sizes is None or not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(
            "input_shape must be the sizes of one sample, such as (3, 32, 32), got "
            f"{shorten(input_shape)}"
        )
    return sizes


class _Builder:
    """Collects nodes while walking the recorded operators."""

    def __init__(self, captured: Captured, frozen: bool) -> None:
        self.captured, self.frozen = captured, frozen
        self.probe = captured.probe
        self.input_shape = tuple(captured.probe.shape[1:])
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Any] = {}
        self.problems: dict[str, str] = {}
        self.node: fx.Node = captured.result

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._visit_placeholder(node)
        elif node.op == "get_attr":  # operators of their own, for a call that takes them
            self.values[node] = Unsupported
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, self.values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, self.values.__getitem__)
            try:
                self.values[node] = self._convert(node, args, dict(kwargs))
                self._check_shape(node)
            except NotImplementedError as error:
                reason = f": {error}" if str(error) else ""
                self.problems.setdefault(self._describe(node), reason)
                self.values[node] = Unsupported

    def _visit_placeholder(self, node: fx.Node) -> None:
        if node.name == self.captured.entry:
            self.nodes.append(Node("input", ops.Input(), (), self.input_shape))
            self.values[node] = Value(0, self.input_shape)
        else:  # a second argument with a default value holds nothing
            held = self.captured.held.get(node.name)
            if self.frozen and isinstance(held, Tensor):
                held = held.data
            self.values[node] = held

    def _convert(self, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if node.target is operator.getitem and not isinstance(args[0], Value | Tensor):
            return args[0] if args[0] in (Unsupported, Computed) else args[0][args[1]]
        if not _contains((Value, Masked, Layered, Unsupported), (args, kwargs)):
            return _among_constants(node, args, kwargs)
        if _packet(node) in _OF_SHAPES and _contains(Value, args[:1]):
            return _of_shape(node, args, kwargs)
        converter = converters.CONVERTERS.get(_packet(node))
        if _contains(Layered, args[:1]):
            converter = converters.OF_LAYERS.get(_packet(node))
            if converter is None:
                raise NotImplementedError("the batch behind another dimension")
        if converter is None:
            raise NotImplementedError
        if _contains(Unsupported, (args, kwargs)):
            return Unsupported  # already reported further up
        if _contains(Computed, (args, kwargs)):
            raise NotImplementedError(
                "a parameter computed from others does not stay up to date; "
                "trace(..., frozen=True) keeps what it is now"
            )
        if _contains(Masked, (args, kwargs)) and _packet(node) not in converters.OF_MASKED:
            raise NotImplementedError("minus infinity, which only a softmax may take")
        try:
            return self._append(node, converter(*args, **kwargs))
        except NotImplementedError:
            raise
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise NotImplementedError(f"arguments not understood ({first_line(error)})") from error

    def _check_shape(self, node: fx.Node) -> None:
        """Refuse what is not the same function of every sample by itself."""
        value, recorded = self.values[node], node.meta.get("val")
        if not isinstance(value, Value) or recorded is None:
            return
        if tuple(recorded.shape) != (len(self.probe), *value.shape):
            raise NotImplementedError(
                f"it makes batches of shape {tuple(recorded.shape)} of samples of shape "
                f"{value.shape}: the batch must stay the first dimension"
            )
        last = node is self.captured.result
        if recorded.dtype != self.probe.dtype and (last or recorded.dtype not in WHOLE):
            raise NotImplementedError(f"its result is of type {recorded.dtype}")

    def _append(self, node: fx.Node, result: Any) -> Any:
        """Add the operations a converter asked for; other results are plain values."""
        if not isinstance(result, Apply | Composed):
            return result
        self.node = node
        if isinstance(result, Composed):
            built = result.build(self)
            return (
                tuple(map(self._value, built)) if isinstance(built, tuple) else self._value(built)
            )
        if not all(isinstance(value, Value) for value in result.inputs):
            raise NotImplementedError("it works on a constant")
        positions = tuple(value.position for value in result.inputs)
        for op in result.operations:
            positions = (self.append(op, *positions),)
        found = self._value(positions[0])
        return (found, Unsupported, Unsupported) if result.first_of_several else found

    def append(self, op: ops.Op, *inputs: int) -> int:
        """Append one operation of the operator at hand and return its position."""
        layer = self.captured.layer(self.node)
        op = self._complete(self.node, self._as_used(op))
        probes = [self.probe.new_zeros(1, *self.nodes[j].shape) for j in inputs]
        with torch.no_grad():
            out = evaluate.RULES[type(op)](op, *probes)
        name = layer[0] if layer else self.node.name
        self.nodes.append(Node(name, op, inputs, tuple(out.shape[1:])))
        return len(self.nodes) - 1

    def shape_of(self, position: int) -> tuple[int, ...]:
        """Return the shape of a node's samples."""
        return self.nodes[position].shape

    def number(self, value: float) -> Tensor:
        """Return a constant; it is rounded to the module's precision when it is used."""
        return torch.tensor(value, dtype=torch.float64)

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Append what another operator becomes, which the one at hand is made of."""
        converter = converters.CONVERTERS[operator]
        return self._append(self.node, converter(*args, **kwargs))

    def _value(self, position: Any) -> Any:
        if position is None:
            return Unsupported
        return Value(position, self.shape_of(position)) if isinstance(position, int) else position

    def _as_used(self, op: ops.Op) -> ops.Op:
        """Return an operation with its constants as the module computes with them.

        PyTorch rounds a Python number to the precision of the tensor before it uses it.
        """
        if isinstance(op, ops.Take):
            return op.map_tensors(lambda t: t.to(self.probe.device))
        numbers = {name: self._number(getattr(op, name)) for name in _NUMBERS.get(type(op), ())}
        if isinstance(op, ops.Function):
            return replace(op, parameters=tuple(self._number(p) for p in op.parameters))
        return replace(op.map_tensors(self._constant), **numbers)

    def _number(self, number: float) -> float:
        return float(self._constant(torch.tensor(number, dtype=torch.float64)))

    def _constant(self, tensor: Tensor) -> Tensor:
        """Return a constant in the module's precision; what has that stays a live tensor."""
        tensor = tensor.to(self.probe.device)
        dtype = self.probe.dtype
        if tensor.dtype == dtype:
            return tensor
        if tensor.is_complex():
            raise NotImplementedError("a complex number")
        if tensor.is_floating_point() and torch.promote_types(tensor.dtype, dtype) == dtype:
            return tensor  # a narrower one is what it is, and as live as the others
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            raise NotImplementedError(f"a parameter of type {tensor.dtype} among {dtype}")
        used = tensor.to(dtype)
        lost = ((used == 0) != (tensor == 0)) | (used.isfinite() != tensor.isfinite())
        if bool(lost.any()):
            raise NotImplementedError(f"a constant beyond the range of {dtype}")
        if dtype in HALF and not torch.equal(used.to(torch.float64), tensor.to(torch.float64)):
            raise NotImplementedError(
                f"a constant that is no number of {dtype}, which PyTorch rounds in one way or "
                "another there; use float32"
            )
        return used

    def _complete(self, node: fx.Node, op: ops.Op) -> ops.Op:
        """Add to a BatchNorm what only its layer knows: how it keeps its statistics."""
        layer = self.captured.layer(node)
        if not isinstance(op, ops.BatchNorm) or layer is None:
            return op
        return converters.complete_batch_norm(op, self.captured.module.get_submodule(layer[0]))

    def finish(self) -> tuple[Graph, dict[fx.Node, int]]:
        """Return the graph, and where it has the result of each operator."""
        if self.problems:
            parts = [f"{part}{reason}" for part, reason in self.problems.items()]
            rest = len(parts) - MOST_NAMED
            more = f"; and {rest} more" if rest > 0 else ""
            raise UserError(
                f"cannot handle these parts of the network: {'; '.join(parts[:MOST_NAMED])}{more}"
                " (the documentation of `trace` lists the layers it knows)"
            )
        output = self.values[self.captured.result]
        if isinstance(output, Layered):
            raise UserError("the network's output must have the batch as its first dimension")
        if not isinstance(output, Value):
            raise UserError("the network must return one tensor that depends on its input")
        graph, place = prune(self.nodes, output.position)
        positions = {
            node: place[value.position]
            for node, value in self.values.items()
            if isinstance(value, Value) and value.position in place and node.op == "call_function"
        }
        return graph, positions

    def _describe(self, node: fx.Node) -> str:
        layer = self.captured.layer(node)
        return f"layer {layer[0]!r} ({layer[1]})" if layer else f"operation {_name(node)!r}"


def _packet(node: fx.Node) -> Any:
    """Return an operator without its variant: `aten.add` for `aten.add.Tensor`."""
    return getattr(node.target, "overloadpacket", node.target)


def _name(node: fx.Node) -> str:
    return str(getattr(_packet(node), "__name__", node.name))


def _among_constants(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """Evaluate a function of constants once and for all."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise NotImplementedError("its result is random")
    if _contains(Computed, (args, kwargs)):
        return Computed
    assert callable(node.target)
    if _is_live((args, kwargs)):
        with torch.enable_grad():
            found = node.target(*args, **kwargs)
        several = found if isinstance(found, tuple | list) else [found]
        return found if all(isinstance(t, Tensor) and is_live(t) for t in several) else Computed
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _is_live(structure: Any) -> bool:
    """Whether a parameter, or a view of one, occurs in the arguments."""
    if isinstance(structure, tuple | list):
        return any(map(_is_live, structure))
    if isinstance(structure, dict):
        return any(map(_is_live, structure.values()))
    return isinstance(structure, Tensor) and is_live(structure)


def _of_shape(node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make a constant that depends on nothing but the shape of a value."""
    assert callable(node.target)
    recorded = node.args[0].meta["val"]  # type: ignore[union-attr]
    like = torch.zeros(recorded.shape, dtype=recorded.dtype, device=recorded.device)
    with torch.no_grad():
        return node.target(like, *args[1:], **kwargs)


def _contains(what: Any, structure: Any) -> bool:
    """Whether a class (or one of several), or an instance of it, occurs in the arguments."""
    if isinstance(structure, tuple | list):
        return any(_contains(what, part) for part in structure)
    if isinstance(structure, dict):
        return any(_contains(what, part) for part in structure.values())
    kinds = what if isinstance(what, tuple) else (what,)
    return structure in kinds if isinstance(structure, type) else isinstance(structure, kinds)
