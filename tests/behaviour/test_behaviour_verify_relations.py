"""`tightrope verify` on relations between inputs and outputs, and on several networks."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Commands, assert_refused
from onnx_files import run_onnx, write_onnx, write_vnnlib

from tightrope.certification import verifying
from tightrope.certification.problem import Problem
from tightrope.certification.subjects import Subject
from tightrope.certification.verifying import verify_file
from tightrope.deadline import Deadline

# y0 = |x0 - x1| + 1/4 and y1 = 0, as x0, x1 in [0, 1]; then the same with 1/2.
NEAR = [([[1, -1], [-1, 1]], [0, 0]), ([[1, 1], [0, 0]], [0.25, 0])]
FAR = [NEAR[0], ([[1, 1], [0, 0]], [0.5, 0])]
UNIT = [("0", "1"), ("0", "1")]


@pytest.mark.parametrize(
    ("formulas", "word"),
    [
        (["(>= (- X_0 X_1) 0.5)", "(<= Y_0 0.74)"], "unsat"),
        (["(>= (- X_0 X_1) 0.5)", "(<= Y_0 0.76)"], "sat"),
        (["(= X_0 X_1)", "(> Y_0 0.2501)"], "unsat"),
        (["(= X_0 X_1)", "(>= Y_0 0.2499)"], "sat"),
        (["(>= Y_0 (+ X_0 1))"], "sat"),
        (["(>= Y_0 (+ X_0 1.26))"], "unsat"),
        (["(or (and (< X_0 X_1) (<= Y_0 0)) (>= Y_0 (+ X_0 X_1 0.2)))"], "sat"),
        (["(or (and (< X_0 X_1) (<= Y_0 0)) (>= Y_0 (+ X_0 X_1 0.3)))"], "unsat"),
    ],
)
def test_relations(commands: Commands, tmp_path: Path, formulas: list[str], word: str) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *NEAR)
    vnnlib = write_vnnlib(tmp_path / "prop.vnnlib", UNIT, 2, *formulas)
    outcome = commands.run("verify", onnx, vnnlib)
    assert outcome.code == 0 and outcome.out.splitlines()[0] == word, outcome.err


def property_of_two(path: Path, relation: str, unsafe: str) -> Path:
    text = f"""(vnnlib-version <2.0>)
    (declare-network f (declare-input A float32 [2]) (declare-output B float32 [2]))
    (declare-network g {relation} (declare-input C float32 [2]) (declare-output D float32 [2]))
    """
    for i in range(2):
        text += f"(assert (and (>= A[{i}] 0) (<= A[{i}] 1)))(assert (== A[{i}] C[{i}]))\n"
    path.write_text(text + f"(assert {unsafe})\n")
    return path


def test_two_networks(commands: Commands, tmp_path: Path) -> None:
    near, far = (write_onnx(tmp_path / f"{i}.onnx", *n) for i, n in enumerate((NEAR, FAR)))
    path = tmp_path / "prop.vnnlib"
    vnnlib = property_of_two(path, "(isomorphic-to f)", "(D[0] <= (+ B[0] 0.2))")
    outcome = commands.run("verify", f"f={near}", f"g={far}", vnnlib)
    assert (outcome.code, outcome.out) == (0, "unsat\n")
    assert verify_file({"f": near, "g": far}, vnnlib)
    vnnlib = property_of_two(path, "(isomorphic-to f)", "(D[0] <= (+ B[0] 0.3))")
    outcome = commands.run("verify", f"f={near}", f"g={far}", vnnlib)
    lines = outcome.out.split("\n")
    heads = [f"{name} float32 [2]" for name in "ABCD"]
    assert [lines[0], *lines[1:13:3]] == ["sat", *heads]
    a, b, c, d = ([float(v) for v in lines[i : i + 2]] for i in range(2, 14, 3))
    assert a == c and run_onnx(near, a) == b and run_onnx(far, c) == d
    assert d[0] <= b[0] + 0.3


def test_a_network_and_itself(commands: Commands, tmp_path: Path) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *NEAR)
    vnnlib = property_of_two(tmp_path / "p.vnnlib", "(equal-to f)", "(> D[0] (+ B[0] 0.001))")
    for files in ([onnx], [f"f={onnx}"], [f"f={onnx}", f"g={onnx}"]):
        outcome = commands.run("verify", *files, vnnlib)
        assert (outcome.code, outcome.out) == (0, "unsat\n"), outcome.err


def test_refusals(commands: Commands, tmp_path: Path) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *NEAR)
    vnnlib = property_of_two(tmp_path / "prop.vnnlib", "", "(> D[0] B[0])")
    assert_refused(commands.run("verify", onnx, vnnlib), "several networks: give f=FILE g=FILE")
    assert_refused(commands.run("verify", f"f={onnx}", vnnlib), "give g=FILE")
    outcome = commands.run("verify", f"f={onnx}", f"h={onnx}", vnnlib)
    assert_refused(outcome, "no network 'h', but f, g")
    assert_refused(commands.run("verify", onnx, onnx, vnnlib), "NAME=FILE once for each network")
    narrow = write_onnx(tmp_path / "narrow.onnx", ([[1.0]], [0.0]), ([[1.0]], [0.0]))
    outcome = commands.run("verify", f"f={onnx}", f"g={narrow}", vnnlib)
    assert_refused(outcome, "they do not belong together")


@pytest.mark.parametrize(("limit", "word"), [("1.26", "verified"), ("1.24", "falsified")])
def test_boxes_that_ask_different_things_are_decided_by_question(
    limit: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = verifying.decide_together

    def noted(subject: Subject, problems: list[Problem], deadline: Deadline) -> object:
        asked.append(len(problems))
        return original(subject, problems, deadline)

    monkeypatch.setattr(verifying, "decide_together", noted)
    onnx = write_onnx(tmp_path / "net.onnx", *NEAR)
    parts = [f"(and (<= X_0 0.{i + 1}) (>= X_0 0.{i}) (>= Y_0 {limit}))" for i in range(5)]
    parts += [f"(and (<= X_1 0.{i + 1}) (>= X_1 0.{i}) (>= Y_1 0.{i + 1}))" for i in range(4)]
    parts.append("(and (<= X_0 0.5) (<= (+ Y_0 Y_1) 0.2))")
    vnnlib = write_vnnlib(tmp_path / "prop.vnnlib", UNIT, 2, f"(or {' '.join(parts)})")
    found = verify_file(onnx, vnnlib)
    assert str(found.verdict) == word
    assert asked == ([5, 4] if word == "verified" else [5])
