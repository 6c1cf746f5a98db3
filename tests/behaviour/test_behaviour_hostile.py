"""Files made to do harm, through the commands: one line, in time, in memory."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import SMALL, Commands, assert_refused, unchanged
from onnx_files import random_layers, write_onnx, write_vnnlib
from PIL import Image

FEW = ("--samples", "4", "--steps", "2", "--restarts", "1")
READERS: dict[str, tuple[str, ...]] = {
    "certify": ("certify", "run", *FEW),
    "attack": ("attack", "run", *FEW),
    "estimate": ("estimate", "run", *FEW),
    "export": ("export", "run", "--onnx", "new.onnx"),
    "report": ("report", "run", "-o", "new.html"),
    "train": ("train", "--out", "run", "--resume"),
}
LIMITS = {"timeout": 120, "memory": 2000}


def refused(commands: Commands, place: Path, arguments: tuple[str, ...], *fragments: str) -> None:
    with unchanged(place):
        assert_refused(commands.run(*arguments, cwd=place, **LIMITS), *fragments)


# --- run folders --------------------------------------------------------------------------------

CONFIGS = {
    "nested lists": ("decay_epochs = " + "[" * 5000 + "]" * 5000, "nested more than 100 levels"),
    "nested tables": ("[" + ".".join("a" * 20_000) + "]", "nested more than 100 levels"),
    "nested keys": (".".join("a" * 20_000) + " = 1", "nested more than 100 levels"),
    "digits": ("seed = " + "9" * 5000, "config.toml"),
    "hexadecimal digits": ("seed = 0x" + "f" * 5000, "more than 64 bits"),
    "decimals": (f'eps = "0.{"1" * 5000}"', "eps must be a number"),
    "escapes in a key": ('"\\u001b[2J\\u0007" = 1', r"unknown setting '\x1b[2J\x07'"),
    "escapes in a name": ('net = "\\u001b]0;x\\u0007"', r"\x1b]0;x\x07"),
    "nul": ('data = "a\\u0000b.npz"', "data must be a name or a path"),
    "nul in a folder": ('data_dir = "a\\u0000b"', "data_dir must be a name or a path"),
    "size": ("#" + " " * 300_000, "exceeds the limit of 262144 bytes"),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("reader", ["certify", "train"])
def test_configs(commands: Commands, run: Path, kind: str, reader: str) -> None:
    line, fragment = CONFIGS[kind]
    name = line.split(" ")[0]
    kept = [
        old for old in (run / "config.toml").read_text().splitlines() if old.split(" ")[0] != name
    ]
    (run / "config.toml").write_text("\n".join([line, *kept]))
    refused(commands, run.parent, READERS[reader], fragment)


def test_escapes_do_not_reach_the_terminal(commands: Commands, run: Path) -> None:
    """A report says what it cannot read, and everything it says is harmless."""
    with (run / "config.toml").open("a") as file:
        file.write('\n["\\u001b[2J"]\n"\\u001b[31m\\u202e" = "\\u0007\\u0000"\n')
    odd = run.with_name("run\x1b[2J\u202e")
    run.rename(odd)
    outcome = commands.run("report", odd.name, "-o", "new.html", cwd=odd.parent, **LIMITS)
    assert outcome.code == 0 and r"run\x1b[2J\u202e" in outcome.out
    page = (odd.parent / "new.html").read_text(encoding="utf-8")
    for text in (outcome.out, outcome.err, page):
        assert not {"\x1b", "\x07", "\0", "\u202e"} & set(text)
    outcome = commands.run("attack", odd.name, *FEW, cwd=odd.parent, **LIMITS)
    assert outcome.code == 2 and "\x1b" not in outcome.err


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": '{"width": 8, "depth": 65536, "batch_norm": false}'},
        {"arguments": '{"width": ' + "9" * 5000 + "}"},
        {"arguments": "[" * 5000 + "]" * 5000},
        {"input_shape": "[" + "1," * 10**6 + "1]"},
    ],
    ids=["layers", "digits", "nesting", "dimensions"],
)
@pytest.mark.parametrize("reader", ["certify", "export"])
def test_architectures(commands: Commands, run: Path, change: dict[str, str], reader: str) -> None:
    values = {
        "format": "1",
        "architecture": '"mlp"',
        "arguments": '{"width": 8, "depth": 1, "batch_norm": false}',
        "input_shape": "[1, 28, 28]",
        "num_classes": "10",
        "normalize": "null",
    }
    values |= change
    text = ", ".join(f'"{name}": {value}' for name, value in values.items())
    (run / "model.json").write_text(f"{{{text}}}")
    refused(commands, run.parent, READERS[reader], "model.json")


@pytest.mark.parametrize("line", ['{"epoch": ' + "9" * 5000 + "}", "[" * 5000, "[" * 10**6])
def test_histories(commands: Commands, run: Path, line: str) -> None:
    path = run / "history.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    refused(commands, run.parent, READERS["train"], "history.jsonl is damaged at line 1")
    outcome = commands.run(*READERS["report"], cwd=run.parent, **LIMITS)
    assert outcome.code == 0 and "history.jsonl is damaged at line 1" in outcome.out


@pytest.mark.parametrize("line", ['{"index": ' + "9" * 5000 + "}", "[" * 5000, "[" * 10**6])
def test_journals(commands: Commands, run: Path, line: str) -> None:
    assert commands.run(*READERS["certify"], cwd=run.parent).code == 0
    path = run / "certification.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    refused(commands, run.parent, READERS["certify"], "certification.jsonl is damaged at line 1")
    outcome = commands.run(*READERS["report"], cwd=run.parent, **LIMITS)
    assert outcome.code == 0 and "certification.jsonl is damaged at line 1" in outcome.out


OF_NETWORK = ("certify", "attack", "estimate", "export", "report")
FILES = {
    "config.toml": tuple(READERS),
    "model.json": OF_NETWORK,
    "model.safetensors": OF_NETWORK,
    "checkpoint.pt": ("train",),
    "history.jsonl": ("train", "report"),
    "certification.jsonl": ("certify", "report"),
    "certification.json": ("certify", "report"),
    "attack.json": ("attack", "report"),
    "estimate.json": ("estimate", "report"),
}


@pytest.mark.parametrize("name", FILES)
def test_pipes_and_holes_are_not_waited_for(commands: Commands, run: Path, name: str) -> None:
    """Whatever a command makes of them, it ends, and without a traceback."""
    for make in (os.mkfifo, make_hole):
        for reader in FILES[name]:
            shutil.rmtree(run.parent / "copy", ignore_errors=True)
            shutil.copytree(run, run.parent / "copy")
            (run.parent / "copy" / name).unlink(missing_ok=True)
            make(run.parent / "copy" / name)
            copy = tuple("copy" if word == "run" else word for word in READERS[reader])
            outcome = commands.run(*copy, cwd=run.parent, **LIMITS)
            assert outcome.code in (0, 2) and "Traceback" not in outcome.err, (reader, outcome)
            if outcome.code == 2:
                assert_refused(outcome, "copy/")


def make_hole(path: Path) -> None:
    """Make a file of a terabyte that needs no room."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


# --- properties and data ------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_onnx(tmp_path / "net.onnx", *random_layers([2, 4, 2]))
    write_vnnlib(tmp_path / "spec.vnnlib", [("0", "1")] * 2, 2, "(<= Y_0 -1000)")
    return tmp_path


@pytest.mark.parametrize("seed", [2**63, 2**64, -1, 10**4000], ids=["63", "64", "-1", "4000"])
def test_seeds_of_verify(commands: Commands, place: Path, seed: int) -> None:
    arguments = ("verify", "net.onnx", "spec.vnnlib", "--seed", str(seed))
    refused(commands, place, arguments, "seed must lie in [0, 2^63)")


def test_bounds_beyond_all_floats(commands: Commands, place: Path) -> None:
    write_vnnlib(place / "spec.vnnlib", [("0", "1")] * 2, 2, "(<= (* 1e-300 X_0) 1e30)")
    assert commands.run("verify", "net.onnx", "spec.vnnlib", cwd=place).out.startswith("sat")
    text = (place / "spec.vnnlib").read_text().replace("(assert (<= X_0 1))", "")
    (place / "spec.vnnlib").write_text(text)
    arguments = ("verify", "net.onnx", "spec.vnnlib")
    refused(commands, place, arguments, "a bound of X_0 above 8e37")


@pytest.mark.parametrize(
    "factor", ["(* " + "1e999 " * 500 + "Y_0)", "(/ Y_0 " + "1e-999 " * 500 + ")"]
)
def test_products_beyond_all_floats(commands: Commands, place: Path, factor: str) -> None:
    write_vnnlib(place / "spec.vnnlib", [("0", "1")] * 2, 2, f"(<= {factor} 1)")
    arguments = ("verify", "net.onnx", "spec.vnnlib")
    refused(commands, place, arguments, "spec.vnnlib: line 9: ")


def test_factors_that_are_no_floats_prove_nothing(commands: Commands, place: Path) -> None:
    """Rounded, they would be another property; those that can be multiplied to floats are."""
    for factor, word in (("0.1", "unsat"), ("100000000000000000001", "unknown")):
        unsafe = f"(<= (+ (* {factor} Y_0) (* 100000000000000000000 Y_1)) -1e30)"
        unsafe = unsafe if word == "unknown" else f"(<= (+ (* {factor} Y_0) Y_1) -1e9)"
        write_vnnlib(place / "spec.vnnlib", [("0", "1")] * 2, 2, unsafe)
        outcome = commands.run("verify", "net.onnx", "spec.vnnlib", cwd=place)
        assert outcome.out.strip() == word
    assert "rounding" in outcome.err


@pytest.mark.parametrize("name", ["net.onnx", "spec.vnnlib"])
def test_pipes_in_place_of_networks_and_properties(
    commands: Commands, place: Path, name: str
) -> None:
    (place / name).unlink()
    os.mkfifo(place / name)
    outcome = commands.run("verify", "net.onnx", "spec.vnnlib", cwd=place, **LIMITS)
    assert_refused(outcome, f"{name}: it is a pipe, not a file")


def test_a_property_that_takes_longer_to_read_than_there_is_time(
    commands: Commands, place: Path
) -> None:
    """Thirty megabytes that are legal; to read all of them takes ten times the limit allowed."""
    path = place / "spec.vnnlib.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write((place / "spec.vnnlib").read_bytes())
        for start in range(0, 1_000_000, 10_000):
            lines = (f"(assert (<= X_0 {i}.5))\n" for i in range(start + 1, start + 10_001))
            file.write("".join(lines).encode())
    arguments = ("verify", "net.onnx", path.name, "--timeout", "0.2")
    outcome = commands.run(*arguments, cwd=place, **LIMITS)
    assert outcome.out.strip() == "timeout" and "not read" in outcome.err


def test_many_alternatives_end_in_time(commands: Commands, place: Path) -> None:
    """Ten thousand attacks would take a minute."""
    unsafe = " ".join(f"(<= Y_{i % 2} -1{i:05d})" for i in range(15_000))
    write_vnnlib(place / "spec.vnnlib", [("0", "1")] * 2, 2, f"(or {unsafe})")
    arguments = ("verify", "net.onnx", "spec.vnnlib", "--timeout", "1")
    outcome = commands.run(*arguments, cwd=place, memory=2000, timeout=31)
    assert outcome.out.strip() in ("timeout", "unsat")


def test_rows_beyond_the_limit(commands: Commands, place: Path) -> None:
    """Half a megabyte of outputs: as a matrix, almost a gigabyte."""
    count = 10_000
    write_onnx(place / "wide.onnx", *random_layers([2, 4, count]))
    unsafe = [f"(<= Y_{i} 0)" for i in range(count)]
    write_vnnlib(place / "spec.vnnlib", [("0", "1")] * 2, count, *unsafe)
    arguments = ("verify", "wide.onnx", "spec.vnnlib")
    refused(commands, place, arguments, "limit of 67108864 coefficients")


def test_a_pipe_among_images(commands: Commands, tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("ant", "bee"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            Image.fromarray(np.full((4, 4), 50, np.uint8)).save(folder / "a.png")
    os.mkfifo(tmp_path / "images" / "train" / "bee" / "z.png")
    arguments = ("train", "--out", "new", *SMALL, "--data", "images")
    outcome = commands.run(*arguments, cwd=tmp_path, **LIMITS)
    assert_refused(outcome, "train/bee/z.png: it is a pipe, not a file")
    assert not (tmp_path / "new").exists()


# --- limits -------------------------------------------------------------------------------------


def test_a_limit_is_named_and_can_be_raised(commands: Commands, place: Path) -> None:
    path = place / "spec.vnnlib"
    path.write_text(path.read_text() + ";" * (1 << 28))
    arguments = ("verify", "net.onnx", "spec.vnnlib")
    refused(commands, place, arguments, "TIGHTROPE_LIMIT_VNNLIB_BYTES")
    raised = {"TIGHTROPE_LIMIT_VNNLIB_BYTES": str(1 << 29)}
    assert commands.run(*arguments, cwd=place, variables=raised).out.strip() == "unsat"
    for variables in (
        {"TIGHTROPE_LIMIT_VNNLIB_BYTES": "lots"},
        {"TIGHTROPE_LIMIT_VNNLIB_BYTE": "9"},
    ):
        outcome = commands.run(*arguments, cwd=place, variables=variables)
        assert_refused(outcome, "VNNLIB_BYTES")
