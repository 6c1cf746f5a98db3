"""One reader per file: commands that need all of it refuse damage, a page shows what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.runs.found import Found, read_objects, read_result
from tightrope.runs.history import read_history
from tightrope.runs.journal import Journal, Record, read_journal
from tightrope.runs.summary import Certification, read_summary, summarize


def record(index: int) -> Record:
    return Record(index, 1, 1, Verdict.VERIFIED, "ibp", 0.5, 0.1, {"ibp": 0.1})


def summary(samples: int = 3) -> dict[str, Any]:
    records = [record(index) for index in range(samples)]
    return summarize(records, samples, {"stages": ["ibp"], "eps": "0.1"}).to_json()


def test_found() -> None:
    assert Found(3).whole() == 3 and Found(3).notices == []
    damaged = Found(3, "it rained", "it will rain")
    assert damaged.notices == ["it rained", "it will rain"]
    with pytest.raises(tr.UserError, match=r"^it rained; wait$"):
        damaged.whole("wait")
    with pytest.raises(tr.UserError, match=r"^it will rain$"):
        Found(3, newer="it will rain").whole()


# --- history.jsonl --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "read", "line"),
    [
        (['{"epoch": 0, "loss": 1}', '{"epoch": 1, "loss": null}'], 2, None),
        (['{"epoch": 0, "made_with": {"torch": "2"}}'], 1, None),
        (['{"epoch": 0}', "{", '{"epoch": 2}'], 1, 2),
        (['{"epoch": 0}', '{"epoch": 2}'], 1, 2),
        (['{"epoch": false}'], 0, 1),
        (["[]"], 0, 1),
        (['{"epoch": 0, "loss": "x"}', '{"epoch": 1}'], 2, 1),
        (['{"epoch": 0, "made_with": 3}'], 1, 1),
    ],
)
def test_history(tmp_path: Path, lines: list[str], read: int, line: int | None) -> None:
    run = tr.Run(tmp_path)
    run.history_file.write_text("".join(text + "\n" for text in lines))
    found = read_history(run.history_file)
    assert [r["epoch"] for r in found.content] == list(range(read))
    assert not any(isinstance(v, str) for r in found.content for v in r.values())
    if line is None:
        assert run.history() == found.content
        return
    assert found.damage == f"{run.history_file} is damaged at line {line}"
    with pytest.raises(tr.UserError, match=f"damaged at line {line}; train again with --force"):
        run.history()


def test_seconds_are_of_training_alone(tmp_path: Path) -> None:
    run = tr.Run(tmp_path)
    run.write_history([{"epoch": 0, "seconds": 2.0, "validation_seconds": 1.0}, {"epoch": 1}])
    assert (run.training_seconds(), run.validation_seconds()) == (2.0, 1.0)


# --- certification.jsonl and certification.json ---------------------------------------------------


def test_journal(tmp_path: Path) -> None:
    path = tmp_path / "certification.jsonl"
    assert read_journal(path) == Found([])
    whole = [record(index) for index in range(3)]
    path.write_text("".join(r.to_line() for r in whole) + whole[0].to_line()[:20])
    before = path.read_bytes()
    assert read_journal(path) == Found(whole)
    assert Journal(path).read(range(3)) == whole
    assert path.read_bytes() == before
    with pytest.raises(tr.UserError, match="damaged at line 3; start over with --force"):
        Journal(path).read(range(2))


def test_a_damaged_journal(tmp_path: Path) -> None:
    path = tmp_path / "certification.jsonl"
    lines = [record(0).to_line(), "{\n", record(0).to_line(), record(1).to_line()]
    path.write_text("".join(lines))
    found = read_journal(path)
    assert found.content == [record(0), record(1)]
    assert found.damage == f"{path} is damaged at line 2 and 1 more"
    with pytest.raises(tr.UserError, match="start over with --force"):
        Journal(path).read(range(3))


def test_a_journal_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "certification.jsonl"
    path.write_text(json.dumps({**json.loads(record(0).to_line()), "proof": "a.bin"}) + "\n")
    found = read_journal(path)
    assert found.content == [record(0)] and found.damage is None
    with pytest.raises(tr.UserError, match=r"does not know \(proof\): a newer version wrote it"):
        Journal(path).read(range(3))


def test_summary(tmp_path: Path) -> None:
    path = tmp_path / "certification.json"
    path.write_text(json.dumps(summary()))
    found = read_summary(path)
    assert Certification.from_json(found.whole()).to_json() == summary()
    older = {k: v for k, v in summary().items() if k != "reasons"}
    assert Certification.from_json(older).to_json() == summary()


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"settings": 3, "samples": 4}'])
def test_a_damaged_summary(tmp_path: Path, content: str) -> None:
    path = tmp_path / "certification.json"
    path.write_text(content)
    found = read_summary(path)
    assert found.content["settings"] == {} and found.damage is not None
    assert str(path) in found.damage
    with pytest.raises(tr.UserError, match=r"again$"):
        found.whole("again")


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 0},
        {"curve": None},
        {"curve": 3},
        {"curve": [None]},
        {"samples": True},
        {"open": -1},
        {"natural": 1.5},
        {"certified": float("nan")},
        {"adversarial": "x"},
        {"seconds": 1e300},
        {"stages": []},
        {"stages": {"ibp": {"verified": 1}}},
        {"stages": {"ibp": 3}},
        {"reasons": {"a": "b"}},
        {"settings": []},
    ],
    ids=str,
)
def test_summaries_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Certification.from_json({**summary(), **changes})


@pytest.mark.parametrize("name", [n for n in summary() if n not in ("reasons", "curve")])
def test_summaries_that_lack_something(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        Certification.from_json({k: v for k, v in summary().items() if k != name})


# --- results and measurements ---------------------------------------------------------------------


def test_results(tmp_path: Path) -> None:
    path = tmp_path / "attack.json"
    assert "is missing (a result)" in (read_result(path, "a result").damage or "")
    path.write_text('{"adversarial": 0.5}')
    assert read_result(path, "a result") == Found({"adversarial": 0.5})
    path.write_text("[]")
    assert read_result(path, "a result").damage == f"{path} is damaged: not a result"


def test_objects(tmp_path: Path) -> None:
    path = tmp_path / "exact.jsonl"
    assert read_objects(path) == Found([])
    path.write_text('{"a": 1}\n{"b": 2}\n{"c"')
    assert read_objects(path) == Found([{"a": 1}, {"b": 2}])
    path.write_text('{"a": 1}\n[1]\n{"b": 2}\n')
    assert read_objects(path) == Found([{"a": 1}], f"{path} is damaged at line 2")


@pytest.mark.parametrize(
    "read",
    [read_history, read_journal, read_summary, read_objects, lambda p: read_result(p, "a result")],
)
def test_a_folder_in_place_of_a_file_is_damage(
    tmp_path: Path, read: Callable[[Path], Found[Any]]
) -> None:
    damage = read(tmp_path).damage
    assert damage is not None and "it is a folder, not a file" in damage
