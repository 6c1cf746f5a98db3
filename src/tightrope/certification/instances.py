"""Instances of a benchmark, decided one after the other the way the competition does it.

A list names a network, a property and a limit in each line; the results are a file with a line for
each instance, written as it is decided. Instances run in processes of their own: one that crashes,
or does not end, is a line like any other.
"""

from __future__ import annotations

import csv
import io
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from tightrope.answer import WORDS, competition_word
from tightrope.certification.carrying import Carried, pack, unpacked
from tightrope.certification.problem import Choices, check_timeout
from tightrope.certification.verifying import verify_and_tell
from tightrope.errors import UserError, shorten
from tightrope.files import open_to_append
from tightrope.limits import INSTANCES, INSTANCES_BYTES
from tightrope.parallel import Send, Watcher, choose_engine, run_in_processes, run_tasks
from tightrope.reading import read_text

DECIDED = ("sat", "unsat")
USUAL_LIMIT = 60.0
# An instance may take a bit longer than its limit; later than that its process is ended.
SLACK, PATIENCE = 1.1, 2.0
ENDED = 1.5
UNDERWAY = 2.0  # until a message from another machine has left


@dataclass(frozen=True)
class Instance:
    """One line of a list: `known` is the right answer, if somebody knows it.

    `number` tells lines with the same files apart; `again` is set if a process has died of it.
    `carried` are its files, where it is decided elsewhere.
    """

    onnx: str
    vnnlib: str
    limit: float
    folder: Path
    number: int = 0
    benchmark: str = ""
    known: str = ""
    again: bool = False
    carried: Carried | None = None

    def __str__(self) -> str:
        return f"{self.onnx} {self.vnnlib}"

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells an instance from others."""
        return self.onnx, self.vnnlib, self.number

    def file(self, name: str) -> Path:
        """Return one of its files; where only the compressed one is there, that."""
        path = self.folder / name
        packed = path.with_name(f"{path.name}.gz")
        return packed if not path.exists() and packed.exists() else path

    def files(self) -> AbstractContextManager[tuple[Path, Path]]:
        """Give the network and the property as files."""
        if self.carried is not None:
            return unpacked(self.carried)
        return nullcontext((self.file(self.onnx), self.file(self.vnnlib)))


@dataclass(frozen=True)
class Outcome:
    """One line of the results."""

    onnx: str
    vnnlib: str
    result: str
    seconds: float
    limit: float
    stage: str = ""
    subproblems: int = 0
    reason: str = ""
    benchmark: str = ""
    known: str = ""

    @property
    def decided(self) -> bool:
        """Whether there is an answer."""
        return self.result in DECIDED

    @property
    def wrong(self) -> bool:
        """Whether the answer is not the known one."""
        return {self.result, self.known} == set(DECIDED)

    @property
    def late(self) -> bool:
        """Whether the limit was not kept."""
        return self.seconds > SLACK * self.limit + PATIENCE


COLUMNS = tuple(field.name for field in fields(Outcome))
Progress = Callable[[Outcome, int, int], None]


def read_instances(path: Path, timeout: float | None = None, only: str = "") -> list[Instance]:
    """Read a list of instances: onnx, vnnlib and seconds, or columns by name behind a header.

    Each gets the smaller of its own limit and `timeout`; `only` chooses those in whose line it is.
    Paths are relative to the list.
    """
    rows = _rows(path)
    if not rows:
        raise UserError(f"{path} has no instances")
    names = [cell.strip().lower() for cell in rows[0][1]]
    header = "onnx" in names or "vnnlib" in names
    if header and not {"onnx", "vnnlib"} <= set(names):
        raise UserError(f"{path}: the header must name onnx and vnnlib, got {shorten(names)}")
    columns = names if header else ["onnx", "vnnlib", "timeout"]
    found, seen = [], Counter[tuple[str, str]]()
    for line, cells in rows[1:] if header else rows:
        if len(cells) < 2 or len(cells) > len(columns):
            raise UserError(
                f"{path}, line {line}: expected {', '.join(columns)}, got {len(cells)} columns"
            )
        values = dict(zip(columns, (cell.strip() for cell in cells), strict=False))
        if only not in " ".join(values.values()):
            continue
        pair = values["onnx"], values["vnnlib"]
        if not all(pair):
            raise UserError(f"{path}, line {line}: the network or the property is missing")
        own = _limit(values.get("timeout", ""), f"{path}, line {line}")
        limit = min((t for t in (own, timeout) if t is not None), default=USUAL_LIMIT)
        family = values.get("benchmark", "") or (pair[0].split("/")[0] if "/" in pair[0] else "")
        known = values.get("verdict", "").lower()
        found.append(Instance(*pair, limit, path.parent, seen[pair], family, known))
        seen[pair] += 1
    if not found:
        raise UserError(f"{path} has no instances with {shorten(only)} in their line")
    return found


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the cells of each line that is not empty, and its number."""
    try:
        text = read_text(path, INSTANCES_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise UserError(f"cannot read {path}: {error}") from None
    INSTANCES.check(len(rows), str(path))
    return rows


def _limit(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
        check_timeout(seconds)
    except ValueError:
        raise UserError(f"{where}: {shorten(text)} is not a number of seconds") from None
    return seconds


def read_outcomes(path: Path) -> list[Outcome]:
    """Read results that were written before; a line that a kill left torn is none."""
    text = read_text(path, INSTANCES_BYTES)
    rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
    if not rows:
        return []
    damaged = UserError(f"{path} is not a file of results; name another one, or remove it")
    if tuple(rows[0]) != COLUMNS:
        raise damaged
    try:
        return [_outcome(row) for row in rows[1:]]
    except (ValueError, TypeError):
        raise damaged from None


def _outcome(row: Sequence[str]) -> Outcome:
    values = dict(zip(COLUMNS, row, strict=True))
    seconds, limit = (float(values.pop(name)) for name in ("seconds", "limit"))
    subproblems = int(values.pop("subproblems"))
    if values["result"] not in WORDS or not math.isfinite(seconds + limit):
        raise ValueError
    return Outcome(seconds=seconds, limit=limit, subproblems=subproblems, **values)


def verify_instances(
    instances: Sequence[Instance],
    out: Path,
    *,
    jobs: int | None = None,
    seed: int = 0,
    choices: Choices,
    device: str = "cpu",
    engine: str = "local",
    address: str | None = None,
    gpus_per_task: float = 0.0,
    progress: Progress = lambda outcome, done, total: None,
) -> list[Outcome]:
    """Decide instances and add a line for each to `out`; those that it has are not run again.

    By `jobs` processes, or on a Ray cluster, to which the files go with their instances.
    """
    cluster = choose_engine(engine, address, gpus_per_task, jobs)
    before = read_outcomes(out) if out.exists() else []
    book = _Book(instances, before, out, progress, carry=cluster is not None)
    if book.left:
        book.open()
        workers = min(jobs or 1, len(book.left))
        try:
            if cluster is None:
                threads = max(1, torch.get_num_threads() // (jobs or 1))
                task = _Prepare(seed, choices, device)
                run_in_processes(task, book.left, book, workers=workers, threads=threads)
            else:
                task = _Prepare(seed, choices, cluster.device.type)
                most = None if jobs is None else workers
                run_tasks(task, book.left, book, workers=most, cluster=cluster)
        finally:
            book.close()
    return [book.known[instance.key] for instance in instances]


@dataclass(frozen=True)
class _Prepare:
    """What a process must know to decide instances."""

    seed: int
    choices: Choices
    device: str

    def __call__(self) -> Callable[[Instance, Send], None]:
        return self.decide

    def decide(self, instance: Instance, send: Send) -> None:
        """Send the outcome; an instance that does not end ends its process."""
        if instance.again:
            send(_failed(instance, 0.0, "the process ended: too little memory, or a crash"))
            return
        started = time.perf_counter()
        speaking = threading.Lock()

        def give_up() -> None:
            with speaking:
                seconds = time.perf_counter() - started
                try:
                    send(replace(_failed(instance, seconds, "it did not end"), result="timeout"))
                    if instance.carried is not None:
                        time.sleep(UNDERWAY)
                finally:
                    os._exit(1)

        most = min(SLACK * instance.limit + ENDED, threading.TIMEOUT_MAX)
        alarm = threading.Timer(most, give_up)
        alarm.daemon = True
        alarm.start()
        try:
            found = self._outcome(instance, started)
        finally:
            alarm.cancel()
            speaking.acquire()  # for good: a late alarm would speak of the next instance
        send(found)

    def _outcome(self, instance: Instance, started: float) -> Outcome:
        try:
            with instance.files() as (network, specification):
                answer, _ = verify_and_tell(
                    network,
                    specification,
                    timeout=instance.limit,
                    seed=self.seed,
                    choices=self.choices,
                    device=self.device,
                )
        except Exception as error:  # the others go on
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            lines = str(error).splitlines() or [""]
            return _failed(instance, time.perf_counter() - started, f"{kind}{lines[0]}")
        return replace(
            _failed(instance, time.perf_counter() - started, answer.reason),
            result=competition_word(answer),
            stage=answer.stage,
            subproblems=answer.subproblems,
        )


def _failed(instance: Instance, seconds: float, reason: str) -> Outcome:
    return Outcome(
        instance.onnx,
        instance.vnnlib,
        "error",
        round(seconds, 3),
        instance.limit,
        reason=reason,
        benchmark=instance.benchmark,
        known=instance.known,
    )


class _Book(Watcher[Instance]):
    """The file of results, and what is left to decide."""

    def __init__(
        self,
        instances: Sequence[Instance],
        before: Iterable[Outcome],
        out: Path,
        progress: Progress,
        carry: bool = False,
    ) -> None:
        self.out, self.progress, self.total, self.carry = out, progress, len(instances), carry
        self.known: dict[tuple[str, str, int], Outcome] = {}
        self.begun: set[tuple[str, str, int]] = set()
        counts = Counter[tuple[str, str]]()
        for outcome in before:
            pair = outcome.onnx, outcome.vnnlib
            self.known[(*pair, counts[pair])] = outcome
            counts[pair] += 1
        for instance in instances:
            earlier = self.known.get(instance.key)
            if earlier is not None and earlier.limit != instance.limit:
                raise UserError(
                    f"{out} has {instance} with a limit of {earlier.limit:g} s instead of "
                    f"{instance.limit:g} s; repeat that --timeout, or name another file by --out"
                )
        self.left = [i for i in instances if i.key not in self.known]

    def open(self) -> None:
        """Open the file to append to it, without a line that a kill left torn."""
        self.file = open_to_append(self.out)
        self.file.seek(0)
        content = self.file.read()
        self.file.truncate(content.rfind(b"\n") + 1)
        if b"\n" not in content:
            self._write(COLUMNS)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def give(self, item: Instance) -> Instance:
        """Say of an instance whether a process has died of it."""
        again = item.key in self.begun
        self.begun.add(item.key)
        if not self.carry:
            return replace(item, again=again)
        files = pack(item.file(item.onnx), item.file(item.vnnlib))
        return replace(item, again=again, carried=files, folder=Path())

    def message(self, item: Instance, message: Outcome) -> None:
        """Write an outcome down; one that came before its process died counts."""
        if item.key in self.known:
            return
        self.known[item.key] = message
        self._write([getattr(message, name) for name in COLUMNS])
        done = self.total - len(self.left) + sum(i.key in self.known for i in self.left)
        self.progress(message, done, self.total)

    def failed(self, item: Instance, error: Exception) -> None:
        """Write a failure down, if nothing else is known."""
        self.message(item, _failed(item, 0.0, str(error).splitlines()[0]))

    def _write(self, cells: Sequence[object]) -> None:
        line = io.StringIO(newline="")
        csv.writer(line, lineterminator="\n").writerow(
            [" ".join(str(cell).split()) for cell in cells]
        )
        self.file.write(line.getvalue().encode())
        self.file.flush()
