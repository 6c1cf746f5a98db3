"""The arrows between packages go one way."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "tightrope"
SHARED = {
    "box",
    "deadline",
    "errors",
    "files",
    "limits",
    "precision",
    "radius",
    "reading",
    "version",
}
MAY_IMPORT = {
    "graph": {"graph"},
    "domains": {"domains", "graph"},
    "attacks": {"attacks", "graph"},
    "training": {"training", "graph", "domains", "attacks"},
    "certification": {"certification", "graph", "domains", "attacks"},
    "nets": {"nets", "graph"},
    "data": {"data"},
    "report": {"report"},
}


def imported_parts(file: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tightrope"):
            path = (node.module or "").split(".")
            names = [path[1]] if len(path) > 1 else [alias.name for alias in node.names]
            parts.update(names)
        elif isinstance(node, ast.Import):
            parts.update(
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("tightrope.")
            )
    return parts


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_follow_the_arrows(package: str) -> None:
    files = list((PACKAGE / package).rglob("*.py"))
    assert files
    for file in files:
        forbidden = imported_parts(file) - MAY_IMPORT[package] - SHARED
        assert not forbidden, f"{file} imports {forbidden}"


def test_files_stay_small() -> None:
    long = {
        str(file): count
        for file in PACKAGE.rglob("*.py")
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long
