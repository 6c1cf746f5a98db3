"""From an `nn.Module` to a `Graph`, by torch.fx.

Each supported layer, function and method has one small converter in the tables at the end
of `tightrope.graph.converters`. Everything that has none is collected, so that the error
names every unsupported layer at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from tightrope.errors import UserError
from tightrope.graph import converters, evaluate, ops
from tightrope.graph.graph import Graph, Node, prune
from tightrope.graph.values import Apply, Batch, Computed, Unsupported, Value


def trace(module: nn.Module, input_shape: tuple[int, ...]) -> Graph:
    """Turn `module` into a graph of operations that Tightrope can bound and attack.

    `input_shape` is the shape of one sample, e.g. `(3, 32, 32)`. The graph shares the
    module's parameters: move the module to its device first, then trace it. Dropout is
    the identity, BatchNorm uses its running statistics, as in evaluation.
    """
    before = set(vars(module))
    try:
        traced = fx.Tracer().trace(module)
    except Exception as error:  # fx raises whatever the module's forward raises on proxies
        raise UserError(
            f"cannot trace {type(module).__name__}: {_first_line(error)} "
            "(the forward pass must not branch on tensor values)"
        ) from error
    finally:
        constants = _forget_constants(module, before)
    builder = _Builder(module, tuple(input_shape), constants)
    for node in traced.nodes:
        builder.visit(node)
    graph = builder.finish()
    _check_against(module, graph, builder.probe)
    return graph


def _forget_constants(module: nn.Module, before: set[str]) -> dict[str, Any]:
    """Take back what fx hung on the module: tensors that its forward pass creates."""
    added = {name: value for name, value in vars(module).items() if name not in before}
    for name in added:
        delattr(module, name)
    return added


@torch.no_grad()
def _check_against(module: nn.Module, graph: Graph, probe: Tensor) -> None:
    """Compare the graph with the module on random points.

    fx does not see that `x += 1` or `ReLU(inplace=True)` also changes other names of the same
    tensor; a graph that computes something else must never be bounded.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(probe.shape, generator=generator).to(probe)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        expected, found = module(x.clone()), graph(x)
    finally:
        for part, mode in modes.items():
            part.training = mode
    scale = expected.abs().max().nan_to_num(0.0)
    if not torch.allclose(found, expected, rtol=1e-3, atol=float(1e-4 * scale), equal_nan=True):
        raise UserError(
            f"the traced network differs from {type(module).__name__} by "
            f"{float((found - expected).abs().max()):.1e} on random inputs; in-place operations "
            "on a tensor that is used again are a likely reason"
        )


class _Builder:
    """Collects nodes while walking the fx graph."""

    def __init__(
        self, module: nn.Module, input_shape: tuple[int, ...], constants: dict[str, Any]
    ) -> None:
        self.module = module
        self.constants = constants
        self.input_shape = input_shape
        self.modules = dict(module.named_modules())
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Any] = {}
        self.problems: list[str] = []
        self.output: Any = None
        tensors = (t for t in module.state_dict().values() if t.is_floating_point())
        parameter = next(tensors, torch.empty(()))
        # Two samples, so that a layer which mixes the batch shows in the shapes.
        self.probe = torch.zeros(2, *input_shape, dtype=parameter.dtype, device=parameter.device)

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._visit_placeholder(node)
        elif node.op == "get_attr":
            self.values[node] = self._attribute(str(node.target))
        elif node.op == "output":
            self.output = self._lookup(node.args[0])
        else:
            self._visit_call(node)

    def _visit_placeholder(self, node: fx.Node) -> None:
        if not self.nodes:
            self.nodes.append(Node("input", ops.Input(), (), self.input_shape))
            self.values[node] = Value(0, self.input_shape)
        elif node.args:
            self.values[node] = node.args[0]  # a second argument with a default value
        else:
            self.problems.append(f"a second input {node.name!r}")
            self.values[node] = Unsupported

    def _visit_call(self, node: fx.Node) -> None:
        args = fx.node.map_arg(node.args, self._lookup)
        kwargs = fx.node.map_arg(node.kwargs, self._lookup)
        try:
            self.values[node] = self._convert(node, args, kwargs)
        except NotImplementedError as error:
            reason = f": {error}" if str(error) else ""
            self.problems.append(f"{self._describe(node)}{reason}")
            self.values[node] = Unsupported

    def _convert(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            args = (self.modules[str(node.target)], *args)
            converter = converters.MODULES.get(type(args[0]))
        elif node.op == "call_function" and not _contains(
            (Value, Batch, Unsupported), (args, kwargs)
        ):
            return _among_constants(node, args, kwargs)
        else:
            table = converters.FUNCTIONS if node.op == "call_function" else converters.METHODS
            converter = table.get(node.target)
        if converter is None:
            raise NotImplementedError
        if _contains(Unsupported, (args, kwargs)):
            return Unsupported  # already reported further up
        if _contains(Computed, (args, kwargs)):
            raise NotImplementedError("a parameter computed from others does not stay up to date")
        try:
            result = converter(*args, **kwargs)
        except (TypeError, ValueError, IndexError, AttributeError) as error:
            raise NotImplementedError(f"arguments not understood ({_first_line(error)})") from error
        return self._append(node, result)

    def _append(self, node: fx.Node, result: Any) -> Any:
        """Add the operations a converter asked for; other results are plain values."""
        if not isinstance(result, Apply):
            return result
        if not all(isinstance(value, Value) for value in result.inputs):
            raise NotImplementedError("it works on a constant")
        inputs = tuple(value.position for value in result.inputs)
        name = str(node.target) if node.op == "call_module" else node.name
        for op in result.operations:
            op = op.map_tensors(lambda t: t.to(self.probe.device))
            probes = [self.probe.new_zeros(2, *self.nodes[j].shape) for j in inputs]
            try:
                with torch.no_grad():
                    out = evaluate.RULES[type(op)](op, *probes)
            except (RuntimeError, IndexError) as error:
                raise UserError(
                    f"layer {name!r} does not fit the input shape {self.input_shape}: "
                    f"{_first_line(error)}"
                ) from None
            self.nodes.append(Node(name, op, inputs, tuple(out.shape[1:])))
            inputs = (len(self.nodes) - 1,)
        return Value(inputs[0], self.nodes[inputs[0]].shape)

    def finish(self) -> Graph:
        if self.problems:
            raise UserError(
                "cannot handle these parts of the network: "
                + "; ".join(self.problems)
                + f". Supported layers: {', '.join(converters.supported_layers())}"
            )
        if not isinstance(self.output, Value):
            raise UserError("the network must return one tensor that depends on its input")
        return prune(self.nodes, self.output.position)

    def _attribute(self, path: str) -> Any:
        if path in self.constants:
            return self.constants[path]
        value: Any = self.module
        for part in path.split("."):
            value = getattr(value, part)
        return value

    def _lookup(self, node: Any) -> Any:
        return self.values[node] if isinstance(node, fx.Node) else node

    def _describe(self, node: fx.Node) -> str:
        if node.op == "call_module":
            kind = type(self.modules[str(node.target)]).__name__
            return f"layer {str(node.target)!r} ({kind})"
        name = getattr(node.target, "__name__", str(node.target))
        return f"operation {name!r}"


def _among_constants(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Evaluate a function of constants once and for all."""
    if _contains((nn.Parameter, Computed), (args, kwargs)):
        return Computed
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _contains(what: Any, structure: Any) -> bool:
    """Whether a class (or one of several), or an instance of it, occurs in the arguments."""
    if isinstance(structure, tuple | list):
        return any(_contains(what, part) for part in structure)
    if isinstance(structure, dict):
        return any(_contains(what, part) for part in structure.values())
    if isinstance(structure, slice):
        return _contains(what, (structure.start, structure.stop, structure.step))
    kinds = what if isinstance(what, tuple) else (what,)
    return structure in kinds if isinstance(structure, type) else isinstance(structure, kinds)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
