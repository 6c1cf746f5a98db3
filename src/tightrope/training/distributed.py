"""Training by several processes, each of which computes its share of every batch.

All of them hold the same weights and draw the same random numbers. What is not a plain sum over
samples is added up before it is used: BatchNorm statistics (`batchnorm.py`), the means that losses
and regularisers are functions of, and once per step the gradients. So a step has the gradient of
the whole batch, however many processes there are. The first one writes; the others only compute.

They talk by gloo on CPUs and by NCCL on GPUs, and meet where `torchrun` tells them to.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightrope import launched
from tightrope.devices import pick_device
from tightrope.draws import Rows, drawn_for
from tightrope.errors import UserError
from tightrope.training.meeting import (
    ToldToEnd,
    find_store,
    ignore_signals,
    meet,
    told_to_end,
)

T = TypeVar("T")

POLL_SECONDS = 0.1
# How long to look for the others when something went wrong.
LAST_WORDS = timedelta(seconds=5)

_joined: Group | None = None


class ProcessLost(UserError):
    """Another process is gone, or all were told to end."""


class Outcome(NamedTuple):
    """What a function returned, or the message of its error."""

    value: Any
    error: str | None


class Group:
    """The processes that train together, as one of them sees it."""

    def __init__(self, store: dist.Store, rank: int, size: int, local: int) -> None:
        self.store, self.rank, self.size, self.local = store, rank, size, local
        self._calls = 0

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def rows(self, total: int) -> Rows:
        """Return this process's rows of a batch: as many as the others', or one more.

        Of fewer rows than processes every process has all, and `counts` says whose count.
        """
        each, more = divmod(total, self.size)
        if not each:
            return Rows(0, total, total)
        first = self.rank * each + min(self.rank, more)
        return Rows(first, first + each + (self.rank < more), total)

    def check_batch(self, samples: int, parts: int) -> None:
        """Refuse batches that leave a process without a sample."""
        if samples // parts < self.size:
            what = f"batches of {samples} samples"
            what += f" in {parts} parts" if parts > 1 else ""
            raise UserError(f"{what} are too small for {self.size} processes: start fewer")

    def counts(self, rows: Rows) -> bool:
        """Return whether what was found on these rows enters sums over all processes."""
        return rows.total >= self.size or self.is_first

    # --- numbers ------------------------------------------------------------------------------

    def add(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place."""
        with self._together():
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return every process's tensor: [processes, ...]."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._together():
            dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def means(self, own: Tensor, share: float) -> Tensor:
        """Return means over the whole batch from those over this process's share of it.

        Their gradient reaches this process's samples only: those of all processes add up to the
        gradient of the whole.
        """
        scaled = own * share
        total = self.add(scaled.detach().clone())
        return total + (scaled - scaled.detach())

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients over all processes, in one piece."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return
        total = self.add(torch.cat([g.reshape(-1) for g in gradients]))
        sizes = [g.numel() for g in gradients]
        for gradient, part in zip(gradients, total.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def add_numbers(self, *numbers: float) -> list[float]:
        """Add up plain numbers over all processes."""
        return self.add(torch.tensor(numbers, dtype=torch.float64)).tolist()

    @torch.no_grad()
    def share_state(self, module: nn.Module) -> None:
        """Give all processes the first one's weights: processors may round differently."""
        with self._together():
            for tensor in module.state_dict().values():
                # gloo sends dense tensors only; weights may be in any memory order.
                sent = tensor.contiguous()
                dist.broadcast(sent, src=0)
                tensor.copy_(sent)

    # --- agreement ----------------------------------------------------------------------------

    def first(self, function: Callable[[], T]) -> T:
        """Let the first process call a function, however long that takes, and return its result."""
        self._calls += 1
        key = f"first/{self._calls}"
        held = [_outcome(function) if self.is_first else None]
        with self._together():
            if self.is_first:
                self.store.set(key, "done")
            else:
                while not self.store.check([key]):
                    time.sleep(POLL_SECONDS)
            dist.broadcast_object_list(held, src=0)
        assert held[0] is not None
        return _value(held[0])

    def each(self, function: Callable[[], T]) -> T:
        """Call a function in every process; if it is refused in one, all refuse."""
        outcome = _outcome(function)
        errors = self._exchange(outcome.error)
        told = next((error for error in errors if error is not None), None)
        if told is None:
            return _value(outcome)
        if all(error == told for error in errors):
            raise UserError(told)
        raise UserError(f"{self._name(errors.index(told))}: {told}")

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Refuse to go on if other processes know other facts than the first one."""
        every = self._exchange((platform.node(), dict(facts)))
        for rank, (host, theirs) in enumerate(every):
            ours = every[0][1]
            other = [k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
            if other:
                where = f" on {host}" if host != every[0][0] else ""
                raise UserError(
                    f"{self._name(rank)}{where} differs from process 0 in {', '.join(other)}; "
                    "start all processes with the same command and the same data"
                )

    def check_draws(self) -> None:
        """Refuse to go on if the processes have not drawn the same random numbers."""
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        if len(set(self._exchange(state))) > 1:
            raise UserError(
                "the processes have drawn different random numbers; a method of your own must "
                "draw for the rows of its batch by tightrope.draws.uniform_like"
            )

    def speaks(self) -> bool:
        """Return whether this process is the first to tell why it ends."""
        try:
            self.store.set_timeout(LAST_WORDS)
            return self.store.add("last words", 1) == 1
        except RuntimeError:  # whoever held the store is gone, and can tell nothing
            return True

    def leave(self, in_order: bool = True) -> None:
        """Say that this process needs the store no more; who holds it waits for the others.

        What talks to a process that is gone may fail again, past help, when it is taken down: so
        it is only taken down in order, and otherwise left to the end of this process.
        """
        with suppress(RuntimeError):
            self.store.set_timeout(LAST_WORDS)
            gone = self.store.add("gone", 1)
            until = time.monotonic() + LAST_WORDS.total_seconds()
            while self.rank == 0 and gone < self.size and time.monotonic() < until:
                time.sleep(0.02)
                gone = self.store.add("gone", 0)
        if in_order and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _exchange(self, value: T) -> list[T]:
        """Return every process's value."""
        values: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(values, value)
        return values

    def _name(self, rank: int) -> str:
        return f"process {rank} of {self.size}"

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Talk to the others; if that fails, one of them is gone."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise lost(self.size) from error


def lost(size: int) -> ProcessLost:
    """Return the error for a process that is gone."""
    return ProcessLost(
        f"one of the {size} processes has ended, or all were told to; finished epochs are saved: "
        "continue with --resume, with any number of processes"
    )


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(function(), None)
    except ProcessLost:
        raise
    except UserError as error:
        return Outcome(None, str(error))


def _value(outcome: Outcome) -> Any:
    if outcome.error is not None:
        raise UserError(outcome.error)
    return outcome.value


# --- one process or several -------------------------------------------------------------------


def first(group: Group | None, function: Callable[[], T]) -> T:
    """Call a function in the first process, if there are several."""
    return function() if group is None else group.first(function)


def each(group: Group | None, function: Callable[[], T]) -> T:
    """Call a function in every process; if it is refused in one, all refuse."""
    return function() if group is None else group.each(function)


@contextmanager
def own_rows(group: Group | None, total: int) -> Iterator[Rows]:
    """Work on this process's rows of a batch; random numbers are drawn for all of it."""
    if group is None:
        yield Rows(0, total, total)
        return
    rows = group.rows(total)
    with drawn_for(rows):
        yield rows


def own_device(group: Group | None, name: str) -> torch.device:
    """Return the device to compute on: of several processes, each has a GPU of its own."""
    device = pick_device(name)
    if group is None or device.type == "cpu":
        return device
    if device.type != "cuda" or device.index is not None:
        raise UserError(f"several processes train on cpu or cuda, each on a device, not on {name}")
    if group.local >= torch.cuda.device_count():
        raise UserError(
            f"there are more processes than GPUs ({torch.cuda.device_count()}); "
            "start as many, or train with --device cpu"
        )
    torch.cuda.set_device(group.local)
    return torch.device("cuda", group.local)


@contextmanager
def joined() -> Iterator[Group | None]:
    """Meet the other processes, if there are any, and tell of one error only."""
    global _joined
    place = launched.place()
    if place is None or _joined is not None:
        yield _joined
        return
    group = None
    try:
        with told_to_end():
            _joined = group = Group(find_store(place), place.rank, place.size, place.local)
            meet(place, group.store)
            yield group
    except BaseException as error:
        ignore_signals()
        ended = lost(place.size) if isinstance(error, ToldToEnd) else error
        if group is not None:
            ended.told_here = group.speaks()  # type: ignore[attr-defined]
            group.leave(in_order=not isinstance(ended, ProcessLost))
        if ended is error:
            raise
        raise ended from error
    else:
        group.leave()
    finally:
        _joined = None
