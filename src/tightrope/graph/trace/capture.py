"""What a module really computes, recorded by torch.export: hooks, in-place changes and all.

The module runs once on tensors without numbers, in evaluation mode. What comes out is a list of
PyTorch's own operators. Where one of them changes a tensor in place, the list is rewritten so that
it has none (`run_decompositions`), and other names of that tensor see the change.
"""

from __future__ import annotations

import contextlib
import operator
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from tightrope.errors import UserError
from tightrope.graph.trace.attention import batch_first
from tightrope.graph.trace.rehearsal import first_line, quiet, rehearse, tensors_of, title

# The number of samples that a module is run on, and so the batch size in its list of operators.
# A prime, so that a size in a module's code is hardly ever mistaken for it.
BATCH = 19
LARGE_INPUT, SMALL_BATCH = 1 << 14, 5

# These change what is known about a tensor, not its numbers.
_HARMLESS = {"aten::detach_", "aten::_assert_tensor_metadata"}

_DROPOUTS = {
    f"{kind}dropout{in_place}"
    for kind in ("", "feature_", "alpha_", "feature_alpha_")
    for in_place in ("", "_")
}


@dataclass(frozen=True, eq=False)
class Captured:
    """A module's operators in the order in which they run.

    `held` maps each placeholder of the list to the module's own tensor (a parameter, a buffer)
    or to a constant; the placeholder `entry` is the input and `result` the output.
    """

    module: nn.Module
    operators: fx.Graph
    held: dict[str, Any]
    entry: str
    result: fx.Node
    probe: Tensor

    def values(self, x: Tensor) -> Iterator[tuple[fx.Node, Any]]:
        """Run the operators on a batch and yield what each of them computes."""
        known: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for node in self.operators.nodes:
                if node.op == "placeholder":
                    known[node] = x if node.name == self.entry else self.held.get(node.name)
                elif node.op == "call_function":
                    assert callable(node.target)
                    args = fx.node.map_arg(node.args, known.__getitem__)
                    kwargs = fx.node.map_arg(node.kwargs, known.__getitem__)
                    known[node] = node.target(*args, **kwargs)
                    yield node, known[node]

    def layer(self, node: fx.Node) -> tuple[str, str] | None:
        """Return name and class of the layer of `torch.nn` that an operator belongs to."""
        for path, kind in reversed((node.meta.get("nn_module_stack") or {}).values()):
            name = path.partition("@")[0]  # a layer's second use is marked by @1
            with contextlib.suppress(AttributeError):
                module = self.module.get_submodule(name)
                if type(module).__module__.startswith("torch.nn") and name:
                    return name, str(kind).rpartition(".")[2]
        return None


def capture(
    module: nn.Module, input_shape: tuple[int, ...], like: Tensor | None = None
) -> Captured:
    """Record what `module` computes from a batch of inputs of that shape, in evaluation mode."""
    probe = _probe(module, input_shape, like)
    _name_a_temporary_folder()
    with evaluating(module):
        rehearse(module, probe[:2].clone())
        try:
            with quiet(), torch.no_grad(), batch_first():
                program = torch.export.export(module, (probe,), strict=False)
                if any(_changes_a_tensor(node) for node in program.graph.nodes):
                    _show_aliases(program)
                    program = program.run_decompositions({})
        except OSError:  # a full disk: not the module's fault
            raise
        except Exception as error:  # export raises whatever the forward pass does on its tensors
            raise UserError(
                f"cannot trace {title(module)}: PyTorch cannot record it: {first_line(error)}"
            ) from error
    held, entry = _placeholders(module, program)
    return Captured(module, program.graph, held, entry, _result(program), probe)


def _name_a_temporary_folder() -> None:
    """Let PyTorch's exporter have a name, which it asks for; Python refuses to on a full disk."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")


def _probe(module: nn.Module, input_shape: tuple[int, ...], like: Tensor | None) -> Tensor:
    """Return a batch of zeros in the precision of the module, or of `like` if it has none."""
    tensors = [t for t in tensors_of(module) if t.is_floating_point()]
    # A number by itself does not say in which precision a module computes.
    weights = [t for t in tensors if nn.parameter.is_lazy(t) or t.dim()]
    given = [] if like is None else [like]
    found = [*weights, *given, *tensors, torch.empty(())][0]
    size = torch.Size(input_shape).numel()
    batch = BATCH if size <= LARGE_INPUT else SMALL_BATCH
    return torch.zeros(batch, *input_shape, dtype=found.dtype, device=found.device)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode and its layers back into the modes they were in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _changes_a_tensor(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and schema.name not in _HARMLESS


def _show_aliases(program: Any) -> None:
    """Write an idle dropout as what it is, another name of its input.

    Rewriting takes it for a copy, and then misses changes in place of the input or of the result.
    """
    for node in program.graph.nodes:
        if str(node.target).removeprefix("aten.").partition(".")[0] in _DROPOUTS:
            value, probability, training = node.args
            if not training or probability == 0:
                node.target, node.args = torch.ops.aten.alias.default, (value,)
    program.graph_module.recompile()


def _placeholders(module: nn.Module, program: Any) -> tuple[dict[str, Any], str]:
    """Return the tensor behind each placeholder, and the name of the input's."""
    held: dict[str, Any] = {}
    entries = []
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            if name in (node.name for node in program.graph.nodes):
                entries.append(name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            held[name] = operator.attrgetter(spec.target)(module)
        else:
            held[name] = program.constants[spec.target]
    if not entries:
        raise UserError(f"cannot trace {title(module)}: it takes no input")
    return held, entries[0]


def _result(program: Any) -> Any:
    """Return the operator that computes the one output."""
    specs = program.graph_signature.output_specs
    # A module may overwrite its input: it gets a copy.
    harmless = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)
    changed = [spec.target for spec in specs if spec.kind not in harmless]
    if changed:
        raise UserError(
            f"the network changes its own state in evaluation ({changed[0]!r}), so it does not "
            "always compute the same"
        )
    out = program.call_spec.out_spec
    (everything,) = next(n for n in program.graph.nodes if n.op == "output").args
    kept = zip(specs, everything, strict=True)
    results = [result for spec, result in kept if spec.kind is OutputKind.USER_OUTPUT]
    single = out is not None and out.is_leaf() and len(results) == 1
    if not single or not isinstance(results[0], fx.Node):
        raise UserError("the network must return one tensor that depends on its input")
    return results[0]
