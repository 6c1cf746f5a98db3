"""`make mutants`: plant each change in a copy of the package and see whether the tests notice.

The checkout is never touched: the tests of a mutant run against a copy of the package that comes
first on PYTHONPATH. The tests pass on the copy as it is, or nothing that follows means anything.
A mutant is killed by a test that fails (or does not end); one that survives must be listed with
a reason, and one that is listed so must survive.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from planted import PACKAGE, ROOT, Mutant, RottenError, read_mutants

PASSED, FAILED = 0, 1  # of pytest's exit codes
ENDLESS = 900.0  # seconds after which a mutant's tests are taken not to end


class Copy:
    """A copy of the package in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / PACKAGE.name
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        self.environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def write(self, file: str, source: str) -> None:
        """Replace a file; what was compiled of it goes by time and size, which may not change."""
        path = self.package / file
        path.write_text(source, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def imported(self) -> bool:
        """Return whether it is this copy that Python finds."""
        command = [sys.executable, "-c", "import tightrope; print(tightrope.__file__)"]
        answer = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return answer.stdout.strip() == str(self.package / "__init__.py")

    def run(self, tests: list[str], *, limit: float | None) -> tuple[int | None, str]:
        """Run tests up to the first that fails; return pytest's exit code and the output.

        The code of tests that do not end within a number of seconds is None.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
        try:
            answer = subprocess.run(
                [*command, *tests],
                cwd=ROOT,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return answer.returncode, answer.stdout + answer.stderr


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
        code, output = copy.run(list(mutant.tests), limit=ENDLESS)
    finally:
        copy.write(mutant.file, source)
    if code is None or code == FAILED:
        found = "killed: its tests do not end" if code is None else f"killed by {failing(output)}"
        return not mutant.reason, found + (" IN SPITE OF ITS REASON" if mutant.reason else "")
    if code != PASSED:
        return False, f"NO TESTS RAN: {output.strip().splitlines()[-1]}"
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
    with tempfile.TemporaryDirectory() as folder:
        return plant(Copy(Path(folder)), mutants)


def plant(copy: Copy, mutants: list[Mutant]) -> int:
    """Judge mutants one after the other."""
    if not copy.imported():
        print("Python does not find the copy of the package first")
        return 1
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    code, output = copy.run(tests, limit=None)
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
