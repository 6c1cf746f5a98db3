"""A GPU for tests on machines that have none.

Inside `pretend_cuda()`, tensors put on `cuda` are tensors of the CPU that say they are on `cuda:0`.
They compute the same numbers, and raise where a GPU would: operations with tensors of both devices,
`.numpy()`, generators of the CPU, index tensors of the CPU (of which a GPU takes some, silently, at
the price of a copy). What a GPU would be asked to do is counted by the line of code that asks:

- ops: dispatched kernels, of forward passes, backward passes and optimisers; neither views nor
  allocations;
- synchronisations: where the program waits for the GPU, because the result, or its size, is
  needed: `.item()`, `bool()`, `nonzero`, masks as indices, copies to the CPU, ...;
- uploads: copies to the GPU, and how many of them were not from pinned memory.

What this cannot tell: whether a kernel exists on a GPU, its rounding, its speed, and what is
decided by the device inside PyTorch's own C++ code.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda:0")
FREE, TOTAL = 8 << 30, 16 << 30  # bytes that the card has

MIXED = "Expected all tensors to be on the same device, but found at least two, cuda:0 and cpu!"

# Allocations and other names: nothing is launched.
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "_reshape_alias", "lift_fresh", "detach", "alias", "set_", "resize_", "_local_scalar_dense",
}  # fmt: skip
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "is_nonzero", "_linalg_check_errors", "linalg_eigvals",
    "linalg_lstsq", "allclose", "multinomial", "histogram",
}  # fmt: skip
# Where PyTorch decides that these are to be handled by a mode.
_WAYS_BACK = {
    torch.autograd.grad: "torch.autograd.has_torch_function",
    torch.autograd.backward: "torch.autograd.has_torch_function",
    Tensor.backward: "torch._tensor.has_torch_function_unary",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_INDEXED = {"index_select", "gather", "scatter", "scatter_", "index_add", "index_add_", "take"}


@dataclass
class Counts:
    """What the GPU was asked to do, by place."""

    ops: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    unpinned: int = 0
    most: int = 0  # bytes of the largest result

    def clear(self) -> None:
        """Forget everything so far."""
        for counter in (self.ops, self.kinds, self.waits, self.uploads):
            counter.clear()
        self.unpinned = self.most = 0

    def describe(self, most: int = 12) -> str:
        """Return the totals and the places with the most."""
        lines = [f"{self.ops.total()} ops, {self.waits.total()} synchronisations"]
        lines += [f"  {count} ops: {place}" for place, count in self.ops.most_common(most)]
        lines += [f"  {count} waits: {place}" for place, count in self.waits.most_common()]
        return "\n".join(lines)


class PretendTensor(Tensor):
    """A tensor that says it is on `cuda:0` and holds its values on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        """Wrap a tensor of the CPU."""
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            requires_grad=False,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a pretended tensor outside pretend_cuda()")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says it is."""
        return CUDA

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        """Return the number of the card."""
        return 0

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Raise as a GPU does."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def tolist(self) -> Any:
        """Wait for the values."""
        _Kernels.current().wait("tolist")
        return self.held.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.held.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        held = PretendTensor(self.held.detach().clone())
        made = nn.Parameter(held) if isinstance(self, nn.Parameter) else held
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"pretended({self.held!r})"


def real(value: Any) -> Any:
    """Return what pretended tensors hold, without asking the GPU for it; for assertions."""
    return tree_map(lambda t: t.held if isinstance(t, PretendTensor) else t, value)


class _Factories(TorchFunctionMode):
    """What asks for a device by name: the C++ side knows the CPU only."""

    def __init__(self, kernels: _Kernels) -> None:
        self.kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _WAYS_BACK:  # what is written in Python on the way back asks, too
            with self, mock.patch(_WAYS_BACK[func], lambda *given: False):
                return func(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and func is getattr(Tensor, name, None):
            return self._moved(name, args, kwargs)
        if name == "pin_memory":
            self.kernels.pinned.append(args[0])
            return args[0]
        if name == "new_tensor" and isinstance(args[0], PretendTensor):
            kwargs.setdefault("device", CUDA)
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        target = torch.device(kwargs["device"])
        if target.type == "cuda":
            if kwargs.get("generator") is not None:
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            return self.kernels.upload(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*real(args), **real(kwargs))

    def _moved(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        if name != "to":
            kwargs["device"] = name
        copies = kwargs.pop("copy", False)
        if rest and isinstance(rest[0], Tensor):  # both are known: it is no tensor of C++'s
            rest[:1] = [rest[0].device, rest[0].dtype]
        if "other" in kwargs:
            other = kwargs.pop("other")
            rest = [other.device, other.dtype]
        device, dtype, _, order = torch._C._nn._parse_to(*rest, **kwargs)
        kind = tensor.device.type if device is None else device.type
        if kind == "meta":
            return Tensor.to(real(tensor), "meta", dtype)
        if isinstance(tensor, PretendTensor) and kind == "cpu":
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NotImplementedError("a pretended copy to the CPU with gradients")
            self.kernels.wait("to")
            tensor, copies = tensor.held.detach().clone(), False
        elif not isinstance(tensor, PretendTensor) and kind == "cuda":
            tensor, copies = self.kernels.upload(tensor.detach().clone(), tensor), False
        how = {"memory_format": torch.preserve_format if order is None else order}
        return Tensor.to(tensor, tensor.dtype if dtype is None else dtype, copy=copies, **how)


class _Kernels(TorchDispatchMode):
    """What the GPU runs."""

    active: ClassVar[list[_Kernels]] = []

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.counts, self.largest = Counts(), largest
        self.pinned: list[Tensor] = []

    @classmethod
    def current(cls) -> _Kernels:
        return cls.active[-1]

    def wait(self, what: str) -> None:
        self.counts.waits[f"{_place()} {what}"] += 1

    def upload(self, made: Any, source: Tensor | None = None) -> Any:
        if not isinstance(made, Tensor) or isinstance(made, PretendTensor):
            return made
        if source is not None:
            self.counts.uploads[_place()] += 1
            self.counts.unpinned += not any(source is p for p in self.pinned)
        else:
            self.counts.ops[_place()] += 1
        return PretendTensor(made.detach())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        tensors = [t for t in given if isinstance(t, Tensor)]
        if not any(isinstance(t, PretendTensor) for t in tensors):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if any(isinstance(g, torch.Generator) for g in given):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if name == "copy_":
            return self._copied(func, args, kwargs)
        self._check_devices(name, args, tensors)
        if self._waits(name, args, kwargs):
            self.wait(name)
        if name not in _NO_KERNEL and not _is_view(func):
            self.counts.ops[_place()] += 1
            self.counts.kinds[name] += 1
        out = func(*real(args), **real(kwargs))
        self._check_size(out)
        out = tree_map(lambda t: PretendTensor(t) if isinstance(t, Tensor) else t, out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[:2]
        if not isinstance(target, PretendTensor):
            self.wait("copy_")
        elif not isinstance(source, PretendTensor):
            self.counts.uploads[_place()] += 1
        else:
            self.counts.ops[_place()] += 1
        func(*real(args), **real(kwargs))
        return target

    def _check_size(self, out: Any) -> None:
        size = max((t.nbytes for t in tree_flatten(out)[0] if isinstance(t, Tensor)), default=0)
        self.counts.most = max(self.counts.most, size)
        if size > self.largest:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has a total capacity "
                "of little. See documentation for Memory Management"
            )

    @staticmethod
    def _check_devices(name: str, args: Any, tensors: list[Tensor]) -> None:
        others = [t for t in tensors if not isinstance(t, PretendTensor)]
        # Numbers wrapped in tensors may stay on the CPU, as indices not even they.
        if any(t.dim() for t in others):
            raise RuntimeError(f"{MIXED} (in {name})")
        positions = args[1] if name in _INDEXING else args[1:3] if name in _INDEXED else []
        chosen = [t for t in positions if isinstance(t, Tensor)]
        if not all(isinstance(t, PretendTensor) for t in (*chosen, *(args[:1] if chosen else []))):
            raise RuntimeError(f"indices should be on the device of the tensor (in {name})")

    @staticmethod
    def _waits(name: str, args: Any, kwargs: Any) -> bool:
        if name in _INDEXING:
            chosen = [t for t in args[1] if isinstance(t, Tensor)]
            return any(t.dtype in (torch.bool, torch.uint8) for t in chosen)
        if name == "repeat_interleave":
            sized = kwargs.get("output_size") is not None
            return not sized and len(args) > 0 and isinstance(args[-1], Tensor)
        return name in _WAITING


def _is_view(func: Any) -> bool:
    returned = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


def _place() -> str:
    """Return the line of Tightrope's code that is being run."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/src/tightrope/" in path:
            inside = path.rpartition("/src/tightrope/")[2]
            return f"{inside}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"


@contextlib.contextmanager
def pretend_cuda(largest: float = math.inf) -> Iterator[Counts]:
    """Let `cuda` be a device in this block, and count what it is asked to do.

    Results of more than `largest` bytes do not fit on the card.
    """
    kernels = _Kernels(largest)
    _Kernels.active.append(kernels)
    try:
        with contextlib.ExitStack() as stack:
            for patch in _patches():
                stack.enter_context(patch)
            # A module that is moved gets new parameters: the old ones cannot hold pretended data.
            stack.callback(
                torch.__future__.set_overwrite_module_params_on_conversion,
                torch.__future__.get_overwrite_module_params_on_conversion(),
            )
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            stack.enter_context(kernels)
            stack.enter_context(_Factories(kernels))
            yield kernels.counts
    finally:
        _Kernels.active.pop()


def _patches() -> list[Any]:
    from torch.utils import _foreach_utils

    grouped = _foreach_utils._group_tensors_by_device_and_dtype

    def group(lists: Any, with_indices: bool = False) -> Any:
        found = grouped(lists, with_indices)
        pretended = any(isinstance(t, PretendTensor) for ts in lists for t in ts)
        return {((CUDA if pretended else d), t): g for (d, t), g in found.items()}

    return [
        mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: (FREE, TOTAL)),
        mock.patch.object(torch.cuda, "memory_reserved", lambda device=None: 1 << 30),
        mock.patch.object(torch.cuda, "memory_allocated", lambda device=None: 1 << 29),
        mock.patch.object(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(0)),
        mock.patch.object(torch.cuda, "set_rng_state", lambda state, device=None: None),
        mock.patch.object(torch.export, "export", _export),
        mock.patch.object(_foreach_utils, "_group_tensors_by_device_and_dtype", group),
        mock.patch.object(nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", group),
    ]


_real_export = torch.export.export


def _export(module: nn.Module, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """Record a copy of the module on the CPU: PyTorch's exporter takes no pretended tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    memo = {id(t): _copied(t) for t in tensors if isinstance(t, PretendTensor)}
    with _outside():
        return _real_export(copy.deepcopy(module, memo), real(args), **kwargs)


def _copied(tensor: PretendTensor) -> Tensor:
    held = tensor.held.detach().clone()
    return nn.Parameter(held, tensor.requires_grad) if tensor.requires_grad else held


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Leave the pretence for a while."""
    from torch.overrides import _pop_mode_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), _pop_mode_temporarily():
        yield
