"""The list of mutants fits the code: each change can be made, and its tests are there.

Whether the tests notice is what `make mutants` finds out.
"""

from __future__ import annotations

import ast
from functools import lru_cache

import pytest
from planted import LISTS, PACKAGE, ROOT, Mutant, RottenError, read_mutants

MUTANTS = read_mutants()
EACH_LIST = pytest.mark.parametrize("name", sorted(path.stem for path in LISTS.iterdir()))


def listed(name: str) -> list[Mutant]:
    return [mutant for mutant in MUTANTS if mutant.name.startswith(f"{name}/")]


@EACH_LIST
def test_the_changes_can_be_made(name: str) -> None:
    (file,) = {mutant.file for mutant in listed(name)}
    source = (PACKAGE / file).read_text(encoding="utf-8")
    before = ast.dump(ast.parse(source))
    for mutant in listed(name):
        changed = mutant.applied(source)
        assert ast.dump(ast.parse(changed)) != before, f"{mutant.name} changes nothing"


@lru_cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@EACH_LIST
def test_their_tests_are_there(name: str) -> None:
    for mutant in listed(name):
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            path, _, function = test.partition("::")
            found = functions(path)
            assert any(f.startswith("test_") for f in found), f"{mutant.name}: {path}"
            assert not function or function in found, f"{mutant.name}: {test}"


def test_there_are_enough_and_each_has_a_name() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert sum(not mutant.reason for mutant in MUTANTS) >= 80


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nowhere", "", "0 times"),
        ("e", "", "times in precision.py, not once"),
        ("def full_precision()", "def (", "does not compile"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(old: str, new: str, message: str) -> None:
    source = (PACKAGE / "precision.py").read_text(encoding="utf-8")
    with pytest.raises(RottenError, match=message):
        Mutant("list/name", "precision.py", old, new, ("tests/x.py",)).applied(source)
