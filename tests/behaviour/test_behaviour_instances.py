"""`tightrope verify --instances`: a list of instances, the way the competition decides it."""

from __future__ import annotations

import csv
import gzip
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Commands, assert_refused
from onnx_files import write_onnx, write_vnnlib

from tightrope.certification.instances import COLUMNS, read_instances, read_outcomes
from tightrope.errors import UserError

UNIT = [("0", "1"), ("0", "1")]
# y0 = |x0 - x1| + 1/4 and y1 = 0, as x0, x1 in [0, 1].
DISTANCE = [([[1, -1], [-1, 1]], [0, 0]), ([[1, 1], [0, 0]], [0.25, 0])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a network, two properties, and one that is damaged."""
    (tmp_path / "a").mkdir()
    write_onnx(tmp_path / "a" / "net.onnx", *DISTANCE)
    write_vnnlib(tmp_path / "a" / "holds.vnnlib", UNIT, 2, "(<= Y_0 0.2499)")
    write_vnnlib(tmp_path / "a" / "fails.vnnlib", UNIT, 2, "(<= Y_0 0.5)")
    (tmp_path / "a" / "damaged.vnnlib").write_text("(assert")
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_list(folder: Path, *lines: str) -> Path:
    (folder / "instances.csv").write_text("\n".join(lines) + "\n")
    return folder / "instances.csv"


def test_three_columns(commands: Commands, folder: Path) -> None:
    listed = write_list(
        folder,
        "a/net.onnx,a/holds.vnnlib,30",
        "./a/net.onnx, a/fails.vnnlib, 30.5",
        "",
        "a/net.onnx,a/damaged.vnnlib,30",
        "a/missing.onnx,a/fails.vnnlib,30",
        "a/net.onnx,a/holds.vnnlib,30",
    )
    outcome = commands.run("verify", "--instances", listed, "--jobs", "2", cwd=folder)
    assert (outcome.code, outcome.err) == (0, "")
    found = rows(folder / "results.csv")
    assert tuple(found[0]) == COLUMNS
    answers = sorted((row["onnx"], row["vnnlib"], row["result"]) for row in found)
    assert answers == sorted(
        [
            ("a/net.onnx", "a/holds.vnnlib", "unsat"),
            ("a/net.onnx", "a/holds.vnnlib", "unsat"),
            ("./a/net.onnx", "a/fails.vnnlib", "sat"),
            ("a/net.onnx", "a/damaged.vnnlib", "error"),
            ("a/missing.onnx", "a/fails.vnnlib", "error"),
        ]
    )
    assert all(row["reason"] for row in found if row["result"] == "error")
    assert "3 of 5 decided (2 unsat, 1 sat), 0 wrong, 0 late" in outcome.out
    # Everything is known: nothing runs again.
    before = (folder / "results.csv").read_bytes()
    again = commands.run("verify", "--instances", listed, "--json", cwd=folder)
    assert again.code == 0 and again.json["instances"] == 5 and again.json["wrong"] == 0
    assert (folder / "results.csv").read_bytes() == before


def test_a_header_with_verdicts(commands: Commands, folder: Path) -> None:
    """An answer that is not the known one is exit code 1; files may be compressed."""
    plain = folder / "a" / "net.onnx"
    plain.with_name("net.onnx.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    listed = write_list(
        folder,
        "benchmark,vnnlib,onnx,verdict,timeout",
        "first,a/holds.vnnlib,a/net.onnx,unsat,20",
        "second,a/fails.vnnlib,a/net.onnx,unsat,",
    )
    packed = folder / "list.csv.gz"
    packed.write_bytes(gzip.compress(listed.read_bytes()))
    out = folder / "deep.csv"
    options = ("--instances", packed, "--out", out, "--timeout", "10")
    outcome = commands.run("verify", *options)
    assert outcome.code == 1 and "WRONG" in outcome.out and "1 wrong" in outcome.out
    found = rows(out)
    assert [(r["benchmark"], r["result"], r["known"]) for r in found] == [
        ("first", "unsat", "unsat"),
        ("second", "sat", "unsat"),
    ]
    assert {row["limit"] for row in found} == {"10.0"}
    assert_refused(
        commands.run("verify", "--instances", packed, "--out", out, "--timeout", "15"),
        "limit of 10 s",
    )
    chosen = commands.run("verify", "--only", "first", *options, "--json")
    assert chosen.code == 0 and chosen.json["instances"] == 1


def test_it_goes_on_behind_a_torn_line(commands: Commands, folder: Path) -> None:
    listed = write_list(
        folder, *(f"a/net.onnx,a/{name}.vnnlib,30" for name in ("holds", "fails", "holds"))
    )
    out = folder / "results.csv"
    assert commands.run("verify", "--instances", listed, "--out", out).code == 0
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:9])
    assert commands.run("verify", "--instances", listed, "--out", out).code == 0
    found = rows(out)
    assert [row["result"] for row in found] == ["unsat", "sat", "unsat"]
    assert out.read_text().startswith("".join(lines[:2]))


def test_a_crash_is_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends is started once more, only to say so."""
    from tightrope.certification import instances
    from tightrope.certification.problem import CHOICES

    given: list[bool] = []

    def instead(prepare: object, items: object, watcher: object, **_: object) -> None:
        work = prepare()  # type: ignore[operator]
        for item in items:  # type: ignore[attr-defined]
            watcher.give(item)  # type: ignore[attr-defined]
            again = watcher.give(item)  # type: ignore[attr-defined]
            given.append(again.again)
            work(again, lambda found, item=item: watcher.message(item, found))  # type: ignore[attr-defined]

    monkeypatch.setattr(instances, "run_in_processes", instead)
    listed = read_instances(write_list(folder, "a/net.onnx,a/holds.vnnlib,30"))
    (found,) = instances.verify_instances(listed, folder / "out.csv", choices=CHOICES)
    assert given == [True] and found.result == "error" and "the process ended" in found.reason
    assert read_outcomes(folder / "out.csv") == [found]


def test_files_go_with_their_instances(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cluster whose machines see nothing of this one's disk."""
    import onnx

    from tightrope.certification import instances
    from tightrope.certification.problem import CHOICES

    beside = onnx.load(folder / "a" / "net.onnx")
    apart = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    onnx.save(beside, folder / "a" / "beside.onnx", **apart)

    def elsewhere(prepare: Any, items: Any, watcher: Any, **_: object) -> None:
        work = prepare()
        given = [(item, pickle.dumps(watcher.give(item))) for item in items]
        shutil.rmtree(folder / "a")
        for item, message in given:
            work(pickle.loads(message), lambda found, item=item: watcher.message(item, found))

    cluster = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(instances, "choose_engine", lambda *_: cluster)
    monkeypatch.setattr(instances, "run_tasks", elsewhere)
    names = ("net holds", "beside fails", "missing fails", "net damaged", "net missing")
    lines = [f"a/{net}.onnx,a/{spec}.vnnlib,30" for net, spec in map(str.split, names)]
    listed = read_instances(write_list(folder, *lines))
    found = instances.verify_instances(listed, folder / "out.csv", choices=CHOICES, engine="ray")
    assert [o.result for o in found] == ["unsat", "sat", "error", "error", "error"]
    assert "a/missing.onnx" in found[2].reason and "a/missing.vnnlib" in found[4].reason
    assert read_outcomes(folder / "out.csv") == found


REFUSED = {
    "empty": ("", "has no instances"),
    "one column": ("net.onnx", "got 1 columns"),
    "four columns": ("a,b,3,4", "got 4 columns"),
    "seconds": ("a.onnx,b.vnnlib,soon", "'soon' is not a number of seconds"),
    "negative": ("a.onnx,b.vnnlib,-3", "is not a number of seconds"),
    "half a header": ("onnx,timeout\na.onnx,3", "the header must name onnx and vnnlib"),
    "no property": ("a.onnx,,3", "the network or the property is missing"),
    "quotes": ('"a.onnx,b', "cannot read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lists_that_are_none(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_instances(tmp_path / "list.csv")


def test_results_that_are_none(commands: Commands, folder: Path) -> None:
    listed = write_list(folder, "a/net.onnx,a/holds.vnnlib,30")
    mine = folder / "mine.csv"
    for text in ("a,b\n1,2\n", ",".join(COLUMNS) + "\nx,y,maybe,1,1,,0,,,\n"):
        mine.write_text(text)
        outcome = commands.run("verify", "--instances", listed, "--out", mine)
        assert_refused(outcome, "is not a file of results")
        assert mine.read_text() == text


def test_refusals(commands: Commands, folder: Path) -> None:
    listed = write_list(folder, "a/net.onnx,a/holds.vnnlib,30")
    net, spec = folder / "a" / "net.onnx", folder / "a" / "holds.vnnlib"
    assert_refused(commands.run("verify"), "give an ONNX file and a VNN-LIB file")
    assert_refused(commands.run("verify", net), "give an ONNX file and a VNN-LIB file")
    assert_refused(commands.run("verify", net, spec, "--instances", listed), "without other files")
    assert_refused(commands.run("verify", net, spec, "--jobs", "2"), "go with --instances")
    assert_refused(commands.run("verify", net, spec, "--engine", "ray"), "go with --instances")
    assert_refused(commands.run("verify", "--instances", listed, "--jobs", "0"), "jobs must be")
    alone = commands.run("verify", "--instances", listed, "--address", "auto")
    assert_refused(alone, "go with engine ray")
    assert_refused(commands.run("verify", "--instances", folder / "no.csv"), "cannot read")
    assert_refused(commands.run("verify", net, spec, "--device", "abacus"), "cannot be used here")
    assert commands.run("verify", net, spec, "--device", "cpu").out == "unsat\n"
