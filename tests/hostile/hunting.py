"""Trying hostile files: what commands do with them, and what they must not."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cases import Arguments, Case, make_case
from commands import Commands, Outcome
from originals import RUN, make_originals

FILES, SEED = 2000, 17
PATIENCE = 120.0  # seconds of a command; more than ten times what any of them may take
MEMORY = 3000  # megabytes of a command, besides what torch and its kin have taken
WORDS = ("unsat", "sat", "unknown", "timeout")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@dataclass(frozen=True)
class Finding:
    """Something that must not happen."""

    number: int
    file: str
    how: str
    arguments: Arguments
    problem: str

    def __str__(self) -> str:
        command = " ".join(self.arguments)
        return f"#{self.number} {self.file} ({self.how}): tightrope {command}\n    {self.problem}"


class Hunt:
    """A number of hostile files and what came of them."""

    def __init__(self, folder: Path, *, seed: int = SEED, jobs: int = 1) -> None:
        self.folder, self.seed = folder, seed
        self.servers = [Commands(folder) for _ in range(jobs)]
        self.originals = folder / "originals" / "place"
        self.codes: Counter[int] = Counter()
        _make_outside(self.originals.parent / "outside")
        make_originals(self.originals, self.servers[0])

    def run(self, numbers: range, tell: bool = False) -> list[Finding]:
        """Try the files of those numbers, each on the next server that is free."""
        free = list(self.servers)

        def attempt(number: int) -> list[Finding]:
            server = free.pop()
            try:
                return self.attempt(number, server)
            finally:
                free.append(server)

        findings: list[Finding] = []
        with ThreadPoolExecutor(len(free)) as pool:
            for done, found in enumerate(pool.map(attempt, numbers), start=1):
                findings += found
                for finding in found if tell else ():
                    print(finding, flush=True)
                if tell and not done % 100:
                    print(f"{done} of {len(numbers)} files, {len(findings)} findings", flush=True)
        return findings

    def attempt(self, number: int, server: Commands) -> list[Finding]:
        """Try one hostile file with all commands that read it."""
        findings = []
        folder = self.folder / f"case-{number}"
        case = make_case(number, self.seed, self.originals, folder)
        spare = Spare(case)
        for arguments in case.target.readers:
            before = _look(folder, case)
            problem = self._problem(server, arguments, case.place)
            after = _look(folder, case)
            if problem is None and after != before:
                problem = f"changed outside: {_difference(before, after)}"
            if problem is not None:
                found = Finding(number, case.target.file, case.how, arguments, problem)
                findings.append(found)
            spare.restore()
        shutil.rmtree(folder)
        return findings

    def _problem(self, server: Commands, arguments: Arguments, place: Path) -> str | None:
        try:
            outcome = server.run(*arguments, cwd=place, timeout=PATIENCE, memory=MEMORY)
        except AssertionError:
            return f"no end after {PATIENCE:.0f} s"
        self.codes[outcome.code] += 1
        return judge(outcome, arguments)

    def close(self) -> None:
        """End the processes."""
        for server in self.servers:
            server.close()


def judge(outcome: Outcome, arguments: Sequence[str]) -> str | None:
    """Return what is wrong with how a command ended, None if nothing is."""
    if outcome.code < 0:
        return f"killed by signal {-outcome.code}: {outcome.err[-300:]}"
    if "Traceback" in outcome.err or outcome.code not in (0, 1, 2):
        return f"exit code {outcome.code}: {outcome.err[-600:]}"
    if _CONTROL.search(outcome.out) or _CONTROL.search(outcome.err):
        return f"control characters: {outcome.out[-200:]!r} {outcome.err[-200:]!r}"
    lines = outcome.err.count("\n")
    if outcome.code == 2 and (lines != 1 or not outcome.err.startswith("tightrope: ")):
        return f"refused in {lines} lines: {outcome.err[-600:]}"
    if outcome.code == 2 and len(outcome.err) > 2100:
        return f"refused in {len(outcome.err)} characters"
    one = arguments[0] == "verify" and "--instances" not in arguments  # of which a list says more
    if one and outcome.code == 0 and outcome.out.split("\n")[0] not in WORDS:
        return f"not an answer: {outcome.out[:200]}"
    return None


def _make_outside(folder: Path) -> None:
    """Files that nothing must touch, of names that are tempting."""
    for name in ("a.txt", "000000.npy", "config.toml", "model.json", "counterexamples/000001.npy"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("keep out")


def _look(folder: Path, case: Case) -> dict[str, tuple[object, ...]]:
    """Return everything in and around a place that no command may change."""
    may_change = {folder / "place" / name for name in case.written}
    spoiled = case.place / case.target.file
    found: dict[str, tuple[object, ...]] = {}
    for root, folders, files in os.walk(folder):
        here = Path(root)
        folders[:] = [name for name in folders if here / name not in may_change]
        for path in (here / name for name in (*folders, *files)):
            if path != spoiled and path not in may_change:
                found[str(path)] = _status(path)
    return found


def _status(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    digest = None
    if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return stat.S_IFMT(status.st_mode), status.st_size, digest


def _difference(before: dict[str, object], after: dict[str, object]) -> str:
    names = before.keys() | after.keys()
    return ", ".join(sorted(n for n in names if before.get(n) != after.get(n)))[:500]


class Spare:
    """A copy of a spoiled run: commands may mend it, and the next one is to meet it as it was."""

    def __init__(self, case: Case) -> None:
        self.run, self.copy = case.place / RUN, case.place.parent / "spare"
        if self.run.is_dir():
            _copy(self.run, self.copy)

    def restore(self) -> None:
        """Put the run back."""
        if self.copy.is_dir():
            shutil.rmtree(self.run, ignore_errors=True)
            _copy(self.copy, self.run)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder with whatever is in it: links stay links, pipes stay pipes, holes holes."""
    os.spawnlp(os.P_WAIT, "cp", "cp", "-a", "--sparse=always", str(source), str(target))
