"""A module runs once as its user runs it, before it is recorded.

A forward pass whose code looks at numbers that depend on the input can compute something else at
other inputs, and recording (on tensors without numbers) may not notice; it is refused here. And
tensors that a module makes at its first run and keeps are then made of numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tightrope.errors import UserError

PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Functions by which Python learns something of a tensor's numbers.
_READS = {
    *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"),
    *("__array__", "__dlpack__", "item", "numpy", "tolist", "untyped_storage"),
    *("allclose", "equal", "is_nonzero"),
    # A shape that depends on numbers says something of them.
    *("argwhere", "masked_select", "nonzero", "unique", "unique_consecutive"),
}


def rehearse(module: nn.Module, x: Tensor) -> None:
    """Run a module and refuse what cannot be recorded faithfully."""
    _check_kind(module, x)
    _check_arguments(module)
    watch = _Watch(x)
    with _layers_entered(module) as layers:
        try:
            # Compiled parts run as they were written, where they can be watched.
            eager = torch.compiler.set_stance("force_eager")
            with quiet(), eager, torch.no_grad(), watch:
                module(x)
        except Exception as failure:  # whatever the module raises
            at = f" (after layer {layers[-1]!r} began)" if layers and layers[-1] else ""
            raise UserError(
                f"cannot trace {title(module)}: {first_line(failure)}{at}; "
                f"the network does not fit the input shape {tuple(x.shape[1:])}"
            ) from failure
    if watch.reads:
        raise UserError(
            f"cannot trace {title(module)}: its code reads numbers that depend on the input "
            f"({watch.reads[0]}); the forward pass must not branch on tensor values"
        )


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module."""
    return chain(module.parameters(), module.buffers())


def title(module: nn.Module) -> str:
    """Return the name of a module's class for messages."""
    return _printable(type(module).__name__)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the class of one that has none."""
    lines = str(error).strip().splitlines()
    return _printable(lines[0]) if lines else type(error).__name__


def _printable(text: str, length: int = 300) -> str:
    """Make a text fit for one line."""
    kept = "".join(c if c.isprintable() else " " for c in text)
    return kept if len(kept) <= length else f"{kept[:length]}..."


def _check_kind(module: nn.Module, x: Tensor) -> None:
    name = title(module)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UserError(
            f"cannot trace {name}: it holds a module made by torch.jit; use the module that was "
            "given to torch.jit"
        )
    if any(nn.parameter.is_lazy(tensor) for tensor in tensors_of(module)):
        raise UserError(
            f"cannot trace {name}: a lazy layer has no parameters yet; run the module once"
        )
    if x.is_meta or any(tensor.is_meta for tensor in tensors_of(module)):
        raise UserError(f"cannot trace {name}: its tensors on the device 'meta' hold no numbers")
    if x.dtype not in PRECISIONS:
        raise UserError(f"cannot trace {name}: it computes in {x.dtype}; use float32 or float64")


def _check_arguments(module: nn.Module) -> None:
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters[1:]:
        if parameter.default is parameter.empty and parameter.kind not in several:
            raise UserError(
                f"cannot trace {title(module)}: it takes a second input "
                f"{parameter.name!r}; wrap it in a module of one input"
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what PyTorch prints about its own business to ourselves; errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    unseen = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(unseen),
            contextlib.redirect_stderr(unseen),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _layers_entered(module: nn.Module) -> Iterator[list[str]]:
    """Yield a list that grows by the names of the layers that begin to run."""
    names = {part: path for path, part in module.named_modules()}
    entered: list[str] = []

    def enter(part: nn.Module, args: Any) -> None:
        if type(part).__module__.startswith("torch.nn") and not list(part.children()):
            entered.append(names.get(part, ""))

    hook = nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        yield entered
    finally:
        hook.remove()


def _changes(name: str) -> bool:
    """Whether a function of that name changes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", "__set__")


class _Watch(TorchFunctionMode):
    """Notes which functions read numbers that depend on `x`.

    It follows memory, not tensors, so that a change through a view counts. A note is not an error
    at once: the module might catch it.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.reads: list[str] = []
        # Kept, so that no memory is used twice.
        self._dependent: dict[int, Any] = {}
        self._mark([x])

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        depends = any(self._memory(t)[0] in self._dependent for t in given)
        name = getattr(function, "__name__", "")
        if depends and name in _READS:
            self.reads.append(name.strip("_"))
        result = function(*args, **kwargs)
        if depends:
            self._mark([*(given[:1] if _changes(name) else []), *tree_leaves(result)])
        return result

    def _mark(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                key, memory = self._memory(tensor)
                self._dependent[key] = memory

    def _memory(self, tensor: Tensor) -> tuple[int, Any]:
        try:
            memory = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors have none
            return id(tensor), tensor
        return memory._cdata, memory
