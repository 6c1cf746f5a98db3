"""Hostile files through every command that reads them; see `hunting`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from cases import TARGETS, choose_target, make_case
from commands import Outcome
from hunting import FILES, SEED, Hunt, judge

FEW = 25


@pytest.fixture(scope="module")
def hunt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hunt]:
    found = Hunt(tmp_path_factory.mktemp("hostile"))
    yield found
    found.close()


def test_a_few_files(hunt: Hunt) -> None:
    findings = hunt.run(range(FEW))
    assert not findings, "\n".join(map(str, findings))
    assert hunt.codes[0] and hunt.codes[2]  # some are accepted, some refused


@pytest.mark.slow
def test_all_files(hunt: Hunt) -> None:
    findings = hunt.run(range(FEW, FILES))
    assert not findings, "\n".join(map(str, findings))


def test_every_kind_of_file_is_among_them(hunt: Hunt, tmp_path: Path) -> None:
    """The same numbers are the same files, and a few hundred hit every target."""
    chosen = [choose_target(Random(f"{SEED}-{number}")) for number in range(300)]
    assert set(chosen) == set(TARGETS)
    again = make_case(7, SEED, hunt.originals, tmp_path / "again")
    first = make_case(7, SEED, hunt.originals, tmp_path / "first")
    assert again.target == first.target == chosen[7] and again.how == first.how


@pytest.mark.parametrize(
    ("code", "out", "err", "problem"),
    [
        (0, "fine\n", "", None),
        (1, "no\n", "", None),
        (2, "", "tightrope: wrong\n", None),
        (-11, "", "", "killed by signal 11"),
        (1, "", "Traceback (most recent call last):\n", "exit code 1"),
        (70, "", "", "exit code 70"),
        (2, "", "tightrope: wrong\nmore\n", "refused in 2 lines"),
        (2, "", "", "refused in 0 lines"),
        (2, "", f"tightrope: {'x' * 3000}\n", "characters"),
        (0, "\x1b[2J\n", "", "control characters"),
        (2, "", "tightrope: \x9b\n", "control characters"),
    ],
)
def test_what_must_not_happen_is_noticed(
    code: int, out: str, err: str, problem: str | None
) -> None:
    found = judge(Outcome(code, out, err), ("report",))
    assert found is None if problem is None else found is not None and problem in found


def test_an_answer_that_is_none() -> None:
    assert judge(Outcome(0, "unsat\n", ""), ("verify", "a.onnx", "b.vnnlib")) is None
    assert judge(Outcome(0, "hello\nunsat\n", ""), ("verify", "a.onnx", "b.vnnlib")) is not None
    assert judge(Outcome(0, "1 of 1 decided\n", ""), ("verify", "--instances", "c.csv")) is None
