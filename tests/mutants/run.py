"""`make mutants`: plant each change in a copy of the package and see whether the tests notice.

The checkout is never touched: the tests of a mutant run against a copy of the package that comes
first on the path. The tests pass on the copy as it is, or nothing that follows means anything.
A mutant is killed by a test that fails (or does not end); one that survives must be listed with
a reason, and one that is listed so must survive. Each run of tests is a fork of this process,
which has imported what takes long to import, and nothing of the package.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from planted import PACKAGE, ROOT, Mutant, RottenError, read_mutants

PASSED, FAILED = 0, 1  # of pytest's exit codes
ANOTHER = 70  # of our own: Python does not find the copy first
ENDLESS = 300  # seconds of computing after which a mutant's tests are taken not to end
STUCK = 20 * ENDLESS  # seconds on the clock, for tests that wait: other processes may be busy
IMPORTED = ("pytest", "hypothesis", "numpy", "scipy.optimize", "numba", "onnx", "torch.export")


class Copy:
    """A copy of the package in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package = folder, folder / PACKAGE.name
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def write(self, file: str, source: str) -> None:
        """Replace a file; what was compiled of it goes by time and size, which may not change."""
        path = self.package / file
        path.write_text(source, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def run(self, tests: list[str], *, endless: bool = False) -> tuple[int | None, str]:
        """Run tests up to the first that fails; return pytest's exit code and the output.

        The code of tests that do not end is None; `endless` ones have all the time they need.
        """
        shown = self.folder / "output"
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=self._test, args=(tests, shown, endless))
        process.start()
        process.join(None if endless else STUCK)
        if process.is_alive():
            process.kill()
            process.join()
            return None, ""
        ended = process.exitcode != -signal.SIGXCPU
        return process.exitcode if ended else None, shown.read_text(errors="replace")

    def _test(self, tests: list[str], shown: Path, endless: bool) -> None:
        """Run tests in this process, which is one of its own, and leave it."""
        with shown.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if not endless:
            resource.setrlimit(resource.RLIMIT_CPU, (ENDLESS, ENDLESS))
        os.environ["PYTHONPATH"] = str(self.folder)  # of the processes that tests start
        sys.path.insert(0, str(self.folder))
        os.chdir(ROOT)
        code = ANOTHER
        if importlib.import_module("tightrope").__file__ == str(self.package / "__init__.py"):
            import pytest

            code = pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(code)


def failing(output: str) -> str:
    """Return the first test that failed, without its folder."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    path, _, test = lines[0].split()[1].partition("::") if lines else ("?", "", "?")
    return f"{Path(path).name}::{test}"


def judge(copy: Copy, mutant: Mutant) -> tuple[bool, str]:
    """Return whether a mutant fared as it should, and what became of it."""
    source = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    copy.write(mutant.file, mutant.applied(source))
    try:
        code, output = copy.run(list(mutant.tests))
    finally:
        copy.write(mutant.file, source)
    if code is None or code == FAILED:
        found = "killed: its tests do not end" if code is None else f"killed by {failing(output)}"
        return not mutant.reason, found + (" IN SPITE OF ITS REASON" if mutant.reason else "")
    if code != PASSED:
        return False, f"NO TESTS RAN ({code}): {output.strip().splitlines()[-1:]}"
    return bool(mutant.reason), f"lives: {mutant.reason}" if mutant.reason else "SURVIVED"


def main() -> int:
    """Plant the mutants that were asked for; return 1 if one does not fare as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="such as 'replay/*'")
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    options = parser.parse_args()
    asked = options.only or ["*"]
    mutants = [m for m in read_mutants() if any(fnmatch(m.name, name) for name in asked)]
    if not mutants:
        print(f"no mutant has such a name: {', '.join(asked)}")
        return 1
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}\t{mutant.reason or 'must be noticed'}")
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        return plant(Copy(Path(folder)), mutants)


def plant(copy: Copy, mutants: list[Mutant]) -> int:
    """Judge mutants one after the other."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    code, output = copy.run(tests, endless=True)
    if code == ANOTHER:
        print("Python does not find the copy of the package first")
        return 1
    if code != PASSED:
        print(output)
        print("these tests fail without any mutant")
        return 1
    wrong = []
    for mutant in mutants:
        started = time.monotonic()
        try:
            good, found = judge(copy, mutant)
        except RottenError as error:
            good, found = False, f"ROTTEN: {error}"
        mark = "  " if good else "! "
        print(f"{mark}{mutant.name}: {found} ({time.monotonic() - started:.0f} s)", flush=True)
        if not good:
            wrong.append(mutant.name)
    killed = sum(not m.reason and m.name not in wrong for m in mutants)
    print(f"{killed} of {len(mutants)} killed, {len(mutants) - killed - len(wrong)} with a reason")
    if wrong:
        print(f"{len(wrong)} did not fare as they should: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
