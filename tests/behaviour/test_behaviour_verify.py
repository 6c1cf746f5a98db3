"""`tightrope verify` from end to end: its four answers, its counterexamples, its refusals."""

from __future__ import annotations

import csv
import re
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import Commands, Outcome, assert_refused, unchanged
from onnx_files import random_layers, run_onnx, write_onnx, write_vnnlib
from torch import nn

from tightrope.certification.verifying import verify, verify_file
from tightrope.certification.vnnlib import parse_counterexample, read_vnnlib
from tightrope.nets.onnx.exporting import export_onnx
from tightrope.nets.onnx.importing import read_onnx

WORDS = {"verified": "unsat", "falsified": "sat"}
COMPETITION = Path(__file__).parents[3] / "shared" / "data" / "vnncomp"
UNIT = [("0", "1"), ("0", "1")]

# y0 = |x0 - x1| + 1/4 and y1 = 0, as x0, x1 in [0, 1].
DISTANCE = [([[1, -1], [-1, 1]], [0, 0]), ([[1, 1], [0, 0]], [0.25, 0])]


def answer(outcome: Outcome) -> str:
    """Return the first line of a command that worked."""
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    return outcome.out.splitlines()[0]


def assert_counterexample(text: str, onnx: Path, vnnlib: Path) -> None:
    """Check a counterexample by itself: in the exact box, replayed by onnxruntime, unsafe."""
    inputs, outputs = parse_counterexample(text)
    specification = read_vnnlib(vnnlib)
    decimals = [Fraction(digits) for digits in re.findall(r"\(X_\d+ ([^)]+)\)", text)]
    assert [float(value) for value in decimals] == list(inputs)
    replayed = run_onnx(onnx, inputs)
    assert list(outputs) == replayed
    assert any(
        case.contains(inputs)
        and all(case.admits(i, value) for i, value in enumerate(decimals))
        and any(conjunction.holds(replayed) for conjunction in case.unsafe)
        for case in specification.cases
    )


# --- the four answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_unsat(commands: Commands, tmp_path: Path, suffix: str) -> None:
    onnx = write_onnx(tmp_path / f"net.onnx{suffix}", *DISTANCE)
    vnnlib = write_vnnlib(tmp_path / f"prop.vnnlib{suffix}", UNIT, 2, "(<= Y_0 0.2499)")
    outcome = commands.run("verify", onnx, vnnlib)
    assert (outcome.code, outcome.out, outcome.err) == (0, "unsat\n", "")
    assert verify_file(onnx, vnnlib).verdict == "verified"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_sat(commands: Commands, tmp_path: Path, suffix: str) -> None:
    onnx = write_onnx(tmp_path / f"net.onnx{suffix}", *DISTANCE)
    box = [("0.1", "0.9"), ("0.3", "0.7")]
    vnnlib = write_vnnlib(tmp_path / f"prop.vnnlib{suffix}", box, 2, "(<= Y_0 0.2501)")
    outcome = commands.run("verify", onnx, vnnlib)
    assert answer(outcome) == "sat"
    assert_counterexample(outcome.out, onnx, vnnlib)
    target = tmp_path / "point.txt"
    outcome = commands.run("verify", onnx, vnnlib, "--counterexample", target)
    assert (outcome.code, outcome.out) == (0, "sat\n")
    assert_counterexample(target.read_text(), onnx, vnnlib)
    assert verify_file(onnx, vnnlib).verdict == "falsified"


def test_a_counterexample_on_a_decimal_border(commands: Commands, tmp_path: Path) -> None:
    """Only the very end of the box is unsafe, and 0.1 is no float: what is printed lies inside."""
    onnx = write_onnx(tmp_path / "net.onnx", ([[1.0]], [0.0]), ([[1.0]], [0.0]))
    vnnlib = write_vnnlib(tmp_path / "p.vnnlib", [("0.1", "0.3")], 1, "(<= Y_0 0.10000001)")
    outcome = commands.run("verify", onnx, vnnlib)
    assert answer(outcome) == "sat"
    assert_counterexample(outcome.out, onnx, vnnlib)


def test_timeout(commands: Commands, tmp_path: Path) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *random_layers([20, 60, 60, 60, 1], scale=0.5))
    box = [("0", "1")] * 20
    vnnlib = write_vnnlib(tmp_path / "prop.vnnlib", box, 1, "(>= Y_0 200)")
    outcome = commands.run("verify", onnx, vnnlib, "--timeout", "0.5")
    assert answer(outcome) == "timeout" and outcome.out == "timeout\n"
    # On a slow machine it is over before the search begins.
    ends = ("subproblems open", "boxes open", "had not ended", "not all of the input boxes")
    ends += ("not read to their end", "not bounded to its end")
    assert any(end in outcome.err for end in ends)


def test_unknown(commands: Commands, tmp_path: Path) -> None:
    """A sum that is exactly zero, less than what rounding allows for: no proof, and no point."""
    layers = [(np.array([[1.0], [1.0]]), [0.0, 0.0]), (np.array([[1.0, -1.0]]), [0.0])]
    onnx = write_onnx(tmp_path / "net.onnx", *layers, activation="Sigmoid")
    vnnlib = write_vnnlib(tmp_path / "prop.vnnlib", [("0", "1")], 1, "(<= Y_0 -1e-300)")
    outcome = commands.run("verify", onnx, vnnlib, "--split", "relu", "--timeout", "5")
    assert answer(outcome) in ("unknown", "timeout") and "subproblems open" in outcome.err


def test_other_bends_than_relus(commands: Commands, tmp_path: Path) -> None:
    """A wave of sigmoids: no counterexample, and no proof by lines alone."""
    places = np.linspace(0.1, 0.9, 8)
    layers = [
        (np.full((8, 1), 40.0), -40 * places),
        (np.array([[1.0, -1.0] * 4]), [0.05]),
    ]
    onnx = write_onnx(tmp_path / "net.onnx", *layers, activation="Sigmoid")
    vnnlib = write_vnnlib(tmp_path / "prop.vnnlib", [("0", "1")], 1, "(<= Y_0 0)")
    assert answer(commands.run("verify", onnx, vnnlib)) == "unsat"  # its one input can be split
    # Parts of what eight sigmoids of one number see: sound, but a long way round.
    outcome = commands.run("verify", onnx, vnnlib, "--split", "relu", "--timeout", "3")
    assert answer(outcome) in ("unsat", "timeout")


@pytest.mark.parametrize("option", ["--split", "--branching", "--cuts"])
def test_choices_that_are_none(commands: Commands, files: tuple[Path, Path], option: str) -> None:
    refuse(commands, *files, option, "inptu", ":", "inptu")


@pytest.mark.parametrize(
    ("level", "word"), [("1", "sat"), ("0.1", "unknown"), ("0.0999999999", "unsat")]
)
def test_a_box_between_two_floats(
    commands: Commands, tmp_path: Path, level: str, word: str
) -> None:
    """The float nearest to 0.1 lies above it: at 0.1 itself, neither is the answer."""
    onnx = write_onnx(tmp_path / "net.onnx", ([[1.0]], [0.0]), ([[1.0]], [0.0]))
    vnnlib = write_vnnlib(tmp_path / "p.vnnlib", [("0.1", "0.1")], 1, f"(<= Y_0 {level})")
    outcome = commands.run("verify", onnx, vnnlib)
    assert answer(outcome) == word and "1 input was fixed at the nearest float32" in outcome.err
    if word == "sat":
        assert f"(X_0 {Decimal(float(np.float32(0.1)))})" in outcome.out


def test_json(commands: Commands, tmp_path: Path) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *DISTANCE)
    target = tmp_path / "point.txt"
    for level, word in (("0.2499", "unsat"), ("0.2501", "sat")):
        vnnlib = write_vnnlib(tmp_path / f"{word}.vnnlib", UNIT, 2, f"(<= Y_0 {level})")
        outcome = commands.run("verify", onnx, vnnlib, "--json", "--counterexample", target)
        assert outcome.code == 0
        result = outcome.json
        assert result["result"] == word and result["seconds"] > 0
        assert (result["bound"] is not None) == (word == "unsat")
        assert target.exists() == (word == "sat")
    assert_counterexample(target.read_text(), onnx, vnnlib)


# --- unsafe sets ----------------------------------------------------------------------------------


def test_several_rows_have_to_hold_together(commands: Commands, tmp_path: Path) -> None:
    """y0 = x0 and y1 = -x0: each alone can be below -0.2 on [-1, 1], both never."""
    onnx = write_onnx(tmp_path / "n.onnx", ([[1], [-1]], [0, 0]), ([[1, -1], [-1, 1]], [0, 0]))
    box = [("-1", "1")]
    both = write_vnnlib(tmp_path / "both.vnnlib", box, 2, "(<= Y_0 -0.2)", "(<= Y_1 -0.2)")
    either = write_vnnlib(tmp_path / "or.vnnlib", box, 2, "(or (<= Y_0 -0.2) (<= Y_1 -0.2))")
    assert answer(commands.run("verify", onnx, both)) == "unsat"
    outcome = commands.run("verify", onnx, either)
    assert answer(outcome) == "sat"
    assert_counterexample(outcome.out, onnx, either)


def test_several_boxes(commands: Commands, tmp_path: Path) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *DISTANCE)

    def boxes(level: str) -> Path:
        far = "(and (>= X_0 0.9) (<= X_0 1) (>= X_1 0) (<= X_1 0.1) (<= Y_0 0.3))"
        near = f"(and (>= X_0 0.4) (<= X_0 0.5) (>= X_1 0.4) (<= X_1 0.5) (<= Y_0 {level}))"
        path = write_vnnlib(tmp_path / f"{level}.vnnlib", [], 2, f"(or {far} {near})")
        inputs = "(declare-const X_0 Real)\n(declare-const X_1 Real)\n"
        path.write_text(inputs + path.read_text())
        return path

    assert answer(commands.run("verify", onnx, boxes("0.2"))) == "unsat"
    outcome = commands.run("verify", onnx, boxes("0.26"))
    assert answer(outcome) == "sat"
    assert_counterexample(outcome.out, onnx, boxes("0.26"))


def test_outputs_that_always_count_as_unsafe(commands: Commands, tmp_path: Path) -> None:
    onnx = write_onnx(tmp_path / "net.onnx", *DISTANCE)
    vnnlib = write_vnnlib(tmp_path / "prop.vnnlib", UNIT, 2)
    outcome = commands.run("verify", onnx, vnnlib)
    assert answer(outcome) == "sat"
    assert_counterexample(outcome.out, onnx, vnnlib)


def test_outputs_that_are_not_finite_are_no_answer(commands: Commands, tmp_path: Path) -> None:
    """Exactly, y0 is 3e38 for all x; what onnxruntime computes is infinite."""
    big = [([[0.0]], [3e38]), ([[2.0]], [-3e38])]
    onnx = write_onnx(tmp_path / "net.onnx", *big)
    for name, formula in (("any", "(<= 0 1)"), ("below", "(<= Y_0 4e38)")):
        vnnlib = write_vnnlib(tmp_path / f"{name}.vnnlib", [("0", "1")], 1, formula)
        outcome = commands.run("verify", onnx, vnnlib)
        assert outcome.code == 2 or answer(outcome) == "unknown"


# --- the same from Python ----------------------------------------------------------------------


def test_python_and_the_command_agree(commands: Commands, tmp_path: Path) -> None:
    """A module, its graph, its ONNX file, and the file with a property: one answer."""
    seen = set()
    for seed in range(6):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
        module.append(nn.Linear(6, 3))
        x = torch.rand(3)
        label = int(module(x[None]).argmax())
        eps = Fraction(1, [64, 16, 4][seed % 3])
        path = tmp_path / f"{seed}.onnx"
        if seed:
            linear = [layer for layer in module if isinstance(layer, nn.Linear)]
            write_onnx(path, *((m.weight.detach(), m.bias.detach()) for m in linear))
        else:
            export_onnx(module, (3,), path)
        onnx = read_onnx(path)
        exact = [Fraction(v) for v in x.tolist()]
        box = [(max(v - eps, Fraction(0)), min(v + eps, Fraction(1))) for v in exact]
        texts = [tuple(f"(/ {s.numerator} {s.denominator})" for s in sides) for sides in box]
        others = [f"(>= Y_{i} Y_{label})" for i in range(3) if i != label]
        vnnlib = write_vnnlib(tmp_path / f"{seed}.vnnlib", texts, 3, f"(or {' '.join(others)})")
        word = answer(commands.run("verify", path, vnnlib))
        for network in (module, onnx.graph, onnx):
            found = verify(network, x, label, eps=eps)
            assert WORDS[found.verdict] == word
            if found.counterexample is not None:
                assert int(module(found.counterexample[None]).argmax()) != label
        assert WORDS[verify_file(path, vnnlib).verdict] == word
        seen.add(word)
    assert seen == {"sat", "unsat"}


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A network and a property that belong together."""
    onnx = write_onnx(tmp_path / "net.onnx", *DISTANCE)
    return onnx, write_vnnlib(tmp_path / "prop.vnnlib", UNIT, 2, "(<= Y_0 0)")


def refuse(commands: Commands, onnx: Path, vnnlib: Path, *rest: str) -> None:
    """Check that a command is refused: `rest` are options, then `:` and parts of the message."""
    split = rest.index(":")
    with unchanged(onnx.parent):
        outcome = commands.run("verify", onnx, vnnlib, *rest[:split])
    assert_refused(outcome, *rest[split + 1 :])


def test_unknown_operators_are_all_named(commands: Commands, files: tuple[Path, Path]) -> None:
    onnx = write_onnx(files[0], *DISTANCE, extra=("Acosh", "Asinh", "Acosh", "Relu"))
    refuse(commands, onnx, files[1], ":", "Acosh", "Asinh", str(onnx))


@pytest.mark.parametrize(
    ("bounds", "unsafe", "message"),
    [
        ([("0", "1")] * 3, "(<= Y_0 0)", "3 inputs"),
        ([("0", "1"), ("1", "0.5")], "(<= Y_0 0)", "X_1 has no possible value"),
        (UNIT, "(Y_0 <= 0)", "line 9"),
        (UNIT, "(<= Y_0", "line 9"),
        (UNIT, "(<= Y_7 0)", "Y_7 is not declared"),
        (UNIT, "(<= (* Y_0 Y_1) 0)", "line 9: a product of variables"),
    ],
)
def test_properties_that_cannot_be(
    commands: Commands,
    files: tuple[Path, Path],
    bounds: list[tuple[str, str]],
    unsafe: str,
    message: str,
) -> None:
    vnnlib = write_vnnlib(files[1], bounds, 2, unsafe)
    refuse(commands, files[0], vnnlib, ":", message, str(vnnlib))


def test_unbounded_inputs(commands: Commands, files: tuple[Path, Path]) -> None:
    onnx, vnnlib = files
    vnnlib.write_text(vnnlib.read_text().replace("(assert (<= X_1 1))", ""))
    refuse(commands, onnx, vnnlib, ":", "X_1 has no upper bound")


def test_sizes_that_do_not_match(commands: Commands, files: tuple[Path, Path]) -> None:
    vnnlib = write_vnnlib(files[1], UNIT, 3, "(<= Y_0 0)")
    refuse(commands, files[0], vnnlib, ":", "3 outputs", "they do not belong together")


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon"])
def test_timeouts_that_are_none(commands: Commands, files: tuple[Path, Path], timeout: str) -> None:
    refuse(commands, *files, "--timeout", timeout, ":", "timeout")


@pytest.mark.parametrize("which", [0, 1])
def test_files_that_are_not_there(commands: Commands, files: tuple[Path, Path], which: int) -> None:
    gone = files[which].with_name("gone")
    given = [gone if i == which else path for i, path in enumerate(files)]
    refuse(commands, *given, ":", str(gone))
    folder = files[which].with_name("folder")
    folder.mkdir()
    refuse(commands, *(folder if i == which else path for i, path in enumerate(files)), ":")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_damaged_networks(commands: Commands, files: tuple[Path, Path], share: float) -> None:
    onnx, vnnlib = files
    content = onnx.read_bytes()
    onnx.write_bytes(content[: int(share * len(content))])
    refuse(commands, onnx, vnnlib, ":", str(onnx))
    packed = onnx.with_suffix(".gz")
    packed.write_bytes(b"\x1f\x8b" + content[: int(share * len(content))])
    refuse(commands, packed, vnnlib, ":", str(packed))


def test_a_network_with_weights_that_are_not_numbers(
    commands: Commands, files: tuple[Path, Path]
) -> None:
    onnx, vnnlib = files
    for bad in (float("nan"), float("inf")):
        write_onnx(onnx, ([[1, bad], [-1, 1]], [0, 0]), DISTANCE[1])
        outcome = commands.run("verify", onnx, vnnlib)
        assert outcome.code == 2 or answer(outcome) == "unknown", outcome
        assert "Traceback" not in outcome.err


# --- the competition's own files ---------------------------------------------------------------

EXPECTED = {
    ("test_sat.onnx", "test_prop.vnnlib"): "sat",
    ("test_unsat.onnx", "test_prop.vnnlib"): "unsat",
    ("test_nano.onnx", "test_nano.vnnlib"): "unsat",
    ("test_tiny.onnx", "test_tiny.vnnlib"): "unsat",
    ("test_small.onnx", "test_small.vnnlib"): "unsat",
}


@pytest.mark.skipif(not COMPETITION.exists(), reason="needs the competition's files")
@pytest.mark.parametrize(("onnx", "vnnlib"), EXPECTED)
def test_the_competitions_test_instances(commands: Commands, onnx: str, vnnlib: str) -> None:
    paths = COMPETITION / "test" / onnx, COMPETITION / "test" / vnnlib
    outcome = commands.run("verify", *paths, "--timeout", "60")
    assert answer(outcome) == EXPECTED[onnx, vnnlib]
    if EXPECTED[onnx, vnnlib] == "sat":
        assert_counterexample(outcome.out, *paths)


@pytest.mark.skipif(not COMPETITION.exists(), reason="needs the competition's files")
@pytest.mark.parametrize("name", ["prop_0_0.03", "prop_1_0.03", "prop_7_0.05"])
def test_instances_on_mnist(commands: Commands, name: str) -> None:
    paths = (
        COMPETITION / "mnistfc" / "mnist-net_256x2.onnx",
        COMPETITION / "mnistfc" / f"{name}.vnnlib",
    )
    outcome = commands.run("verify", *paths, "--timeout", "60")
    with (COMPETITION / "instances.csv").open(newline="") as file:
        known = {row["vnnlib"]: row["verdict"] for row in csv.DictReader(file)}
    expected = known[f"mnistfc/{name}.vnnlib"]
    assert answer(outcome) == expected
    if expected == "sat":
        assert_counterexample(outcome.out, *paths)
