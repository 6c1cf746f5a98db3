"""The arrows between packages go one way."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "tightrope"
SHARED = {
    "allocation",
    "answer",
    "budget",
    "box",
    "compiling",
    "deadline",
    "devices",
    "draws",
    "errors",
    "files",
    "launched",
    "limits",
    "precision",
    "radius",
    "reading",
    "version",
    "waiting",
}
MAY_IMPORT = {
    "graph": set(),
    "domains": {"graph"},
    "attacks": {"graph"},
    "nets": {"graph"},
    "data": set(),
    "parallel": set(),
    "runs": {"nets", "data"},
    "training": {"graph", "domains", "attacks", "nets", "data", "runs"},
    "certification": {"graph", "domains", "attacks", "nets", "data", "runs", "parallel"},
    "page": {"runs"},
    "study": {
        *("graph", "domains", "attacks", "nets", "data", "runs", "parallel"),
        *("training", "certification", "page"),
    },
}
LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS = 400, 60, 8


def package_files() -> Iterator[tuple[str, Path]]:
    """Yield each package's files."""
    for file in sorted(PACKAGE.rglob("*.py")):
        inside = file.relative_to(PACKAGE).parts
        if len(inside) > 1:
            yield inside[0], file


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield what a file imports of ours: a module, and the name taken from it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tightrope":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.startswith("tightrope"))


def part(module: str, name: str) -> str:
    """Return the package or the file at the top that an import is of."""
    return [*module.split(".")[1:], name][0]


def test_every_package_has_its_arrows() -> None:
    assert {package for package, _ in package_files()} == {*MAY_IMPORT, "cli"}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_follow_the_arrows(package: str) -> None:
    files = [file for name, file in package_files() if name == package]
    assert files
    for file in files:
        parts = {part(*found) for found in imported(file)}
        forbidden = parts - MAY_IMPORT[package] - SHARED - {package}
        assert not forbidden, f"{file} imports {forbidden}"


def test_there_is_no_cycle() -> None:
    left = {name: set(others) for name, others in MAY_IMPORT.items()}
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for name in free:
            del left[name]


def test_what_is_open_to_all_imports_no_package() -> None:
    for name in SHARED:
        parts = {part(*found) for found in imported(PACKAGE / f"{name}.py")}
        assert parts <= SHARED, name


def test_what_estimates_is_for_training_only() -> None:
    """Random projections bound nothing, and no verdict comes from a domain that knows them."""
    estimating = {"error_terms", "hybrid", "zonotope", "dual"}
    found = {
        str(file.relative_to(PACKAGE))
        for package, file in package_files()
        if package in ("certification", "domains")
        and estimating & {word for found in imported(file) for word in ".".join(found).split(".")}
    }
    own = {"domains/error_terms.py", "domains/hybrid.py", "domains/zonotope.py"}
    assert found - own == {"certification/bounding.py"}  # `tr.bounds`, which says no verdict
    assert "projections" not in (PACKAGE / "certification" / "bounding.py").read_text()


def test_only_the_contents_of_pages_know_runs() -> None:
    for package, file in package_files():
        if package == "page" and "contents" not in file.parts:
            assert "runs" not in {part(*found) for found in imported(file)}, file


def test_private_names_stay_in_their_module() -> None:
    for _, file in package_files():
        private = [name for _, name in imported(file) if name.startswith("_") and name[1] != "_"]
        assert not private, f"{file} imports {private}"


def test_files_and_functions_stay_small() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_FILE, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                _check_function(file, node)


def test_files_of_tests_stay_small() -> None:
    lengths = {
        file: len(file.read_text(encoding="utf-8").splitlines())
        for file in Path(__file__).parent.rglob("*.py")
    }
    assert len(lengths) > 100
    assert not {file: length for file, length in lengths.items() if length > LONGEST_FILE}


def test_names_of_tests_and_helpers_are_their_own() -> None:
    """They are imported by name, from whichever folder they are in."""
    files = [file.stem for file in Path(__file__).parent.rglob("*.py")]
    plain = [name for name in files if name not in ("conftest", "run")]
    assert sorted(plain) == sorted(set(plain))
    assert not set(plain) & sys.stdlib_module_names


def _check_function(file: Path, function: ast.FunctionDef) -> None:
    where = f"{file}: {function.name}"
    private = function.name.startswith("_") and function.name != "__init__"
    inside = private or not function.args.kwonlyargs
    if file.stem.endswith("_kernel"):
        return
    assert (function.end_lineno or 0) - function.lineno < LONGEST_FUNCTION, where
    given = [*function.args.posonlyargs, *function.args.args]
    given += function.args.kwonlyargs if inside else []
    names = [argument.arg for argument in given if argument.arg not in ("self", "cls")]
    assert len(names) <= MOST_PARAMETERS, where
