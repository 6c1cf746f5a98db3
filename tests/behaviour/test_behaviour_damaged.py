"""Damaged, hostile and foreign files in a run folder: refused in one line, left as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from badfiles import truncate, write_bomb
from commands import SMALL, Commands, assert_refused, unchanged

RESUME = ("train", "--out", "run", "--resume")
CERTIFY = ("certify", "run", "--samples", "20", "--steps", "3", "--restarts", "1")
ATTACK = ("attack", "run", "--samples", "20", "--steps", "3", "--restarts", "1")
EXPORT = ("export", "run", "--onnx", "net.onnx")


@pytest.fixture(scope="module")
def other_run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another network: as deep, but wider."""
    folder = tmp_path_factory.mktemp("other") / "run"
    outcome = commands.run("train", "--out", folder, *SMALL, "--set", "width=9")
    assert outcome.code == 0, outcome.err
    return folder


def refused(commands: Commands, run: Path, arguments: tuple[str, ...], *fragments: str) -> None:
    with unchanged(run.parent):
        assert_refused(commands.run(*arguments, cwd=run.parent), *fragments)


@pytest.fixture
def half(run: Path) -> Path:
    """A run that was stopped after two of its four epochs."""
    history = (run / "history.jsonl").read_text().splitlines(keepends=True)
    (run / "history.jsonl").write_text("".join(history[:2]))
    change_checkpoint(run / "checkpoint.pt", epoch=2)
    return run


def change_checkpoint(path: Path, **changes: object) -> None:
    content = torch.load(path, weights_only=True)
    torch.save({k: v for k, v in {**content, **changes}.items() if v != "absent"}, path)


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95, 0.9999])
def test_a_truncated_checkpoint(commands: Commands, run: Path, share: float) -> None:
    truncate(run / "checkpoint.pt", share)
    refused(commands, run, RESUME, "checkpoint.pt is damaged", "--force")


def test_a_checkpoint_with_flipped_bits(commands: Commands, run: Path) -> None:
    """A weight with one bit flipped must not be trained on."""
    path = run / "checkpoint.pt"
    weight = torch.load(path, weights_only=True)["model"]["1.weight"]
    content = bytearray(path.read_bytes())
    position = content.find(weight.numpy().tobytes())
    assert position > 0
    content[position + 1002] ^= 0x40
    path.write_bytes(content)
    refused(commands, run, RESUME, "checkpoint.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_run_code(commands: Commands, run: Path, zipped: bool) -> None:
    marker = run.parent / "marker"
    write_bomb(run / "checkpoint.pt", marker, zipped=zipped)
    refused(commands, run, RESUME, "checkpoint.pt is damaged")
    assert not marker.exists()


def test_half_a_run_can_be_resumed(commands: Commands, half: Path) -> None:
    """The tests below change one thing in a run that is otherwise fine."""
    assert commands.run(*RESUME, cwd=half.parent).code == 0
    assert len((half / "history.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"format": "absent"},
        {"epoch": "absent"},
        {"model": "absent"},
        {"something": 1},
        {"epoch": "two"},
        {"epoch": 2.5},
        {"epoch": -1},
        {"epoch": 400},
        {"epoch": None},
        {"best": "good"},
        {"model": 3},
        {"model": {}},
        {"model": {"1.weight": 3}},
        {"optimizer": 3},
        {"optimizer": {}},
        {"optimizer": {"state": {}, "param_groups": []}},
        {"optimizer": {"state": {}, "param_groups": [3, 4]}},
    ],
    ids=str,
)
def test_a_checkpoint_of_wrong_content(
    commands: Commands, half: Path, changes: dict[str, object]
) -> None:
    change_checkpoint(half / "checkpoint.pt", **changes)
    refused(commands, half, RESUME, "run/")


@pytest.mark.parametrize("content", [[], 3, torch.zeros(3), {}], ids=["list", "3", "tensor", "{}"])
def test_a_checkpoint_that_is_something_else(
    commands: Commands, run: Path, content: object
) -> None:
    torch.save(content, run / "checkpoint.pt")
    refused(commands, run, RESUME, "checkpoint.pt")


def test_a_checkpoint_of_another_network(commands: Commands, run: Path, other_run: Path) -> None:
    shutil.copy(other_run / "checkpoint.pt", run / "checkpoint.pt")
    refused(commands, run, RESUME, "checkpoint.pt does not belong to the network")


def test_the_optimiser_of_another_network(commands: Commands, half: Path, other_run: Path) -> None:
    """Torch takes momenta of any shape and fails only when it steps, in the midst of training."""
    foreign = torch.load(other_run / "checkpoint.pt", weights_only=True)["optimizer"]
    change_checkpoint(half / "checkpoint.pt", optimizer=foreign)
    refused(commands, half, RESUME, "checkpoint.pt")


def test_weights_in_a_checkpoint_that_are_not_finite(commands: Commands, half: Path) -> None:
    model = torch.load(half / "checkpoint.pt", weights_only=True)["model"]
    model["1.weight"][0, 0] = torch.nan
    change_checkpoint(half / "checkpoint.pt", model=model)
    refused(commands, half, RESUME, "checkpoint.pt")


# --- settings and history -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"net = ", "config.toml is damaged"),
        (b"\xff\xfe", "config.toml is damaged"),
        (b'nett = "mlp"', "unknown setting 'nett'; did you mean 'net'?"),
        (b'net = "mlpp"', "did you mean 'mlp'?"),
        (b"eps = 2", "(0, 1]"),
        (b"eps = [1]", "eps"),
        (b"epochs = -3", "epochs"),
        (b"method = 3", "method"),
        (b"net = 3", "net"),
        (b"data = 3", "data"),
        (b"width = {a = 3}", "width"),
    ],
)
@pytest.mark.parametrize("arguments", [RESUME, CERTIFY], ids=["train", "certify"])
def test_a_damaged_config(
    commands: Commands, run: Path, arguments: tuple[str, ...], content: bytes, fragment: str
) -> None:
    settings = (run / "config.toml").read_bytes().splitlines(keepends=True)
    name = content.split(b" ")[0]
    kept = [line for line in settings if not line.startswith(name + b" ")]
    content = b"".join([content, b"\n", *kept])
    (run / "config.toml").write_bytes(content)
    if fragment in ("net", "did you mean 'mlp'?") and arguments is CERTIFY:
        fragment = "net"
    refused(commands, run, arguments, fragment)


def test_an_empty_config(commands: Commands, half: Path) -> None:
    """Nothing but defaults is not the run that the checkpoint is of."""
    (half / "config.toml").write_bytes(b"")
    refused(commands, half, RESUME, "config.toml")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"epoch": 1,', '"epoch": 7,'),
        lambda text: text.replace('"epoch": 1,', '"epoch": "one",'),
        lambda text: text.replace('"epoch": 1,', ""),
        lambda text: text.replace("{", "", 1),
        lambda text: "3\n" + text,
        lambda text: "[]\n" + text,
        lambda text: "null\n" + text,
        lambda text: text + text,
        lambda text: "\xff\xfe" + text,
    ],
    ids=["empty", "half", "7", "one", "no-epoch", "brace", "3", "[]", "null", "twice", "latin"],
)
def test_a_damaged_history(commands: Commands, run: Path, change: Callable[[str], str]) -> None:
    path = run / "history.jsonl"
    path.write_text(change(path.read_text()), encoding="latin-1")
    refused(commands, run, RESUME, "history.jsonl", "--force")


@pytest.mark.parametrize("name", ["config.toml", "checkpoint.pt", "history.jsonl"])
def test_a_folder_in_place_of_a_file(commands: Commands, run: Path, name: str) -> None:
    (run / name).unlink()
    (run / name).mkdir()
    refused(commands, run, RESUME, name)


# --- the network --------------------------------------------------------------------------------

READERS = pytest.mark.parametrize(
    "arguments", [ATTACK, CERTIFY, EXPORT], ids=["attack", "certify", "export"]
)


@READERS
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9999])
def test_truncated_weights(
    commands: Commands, run: Path, arguments: tuple[str, ...], share: float
) -> None:
    truncate(run / "model.safetensors", share)
    refused(commands, run, arguments, "model.safetensors")


@READERS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(
    commands: Commands, run: Path, arguments: tuple[str, ...], value: float
) -> None:
    tensors = safetensors.torch.load_file(run / "model.safetensors")
    tensors["1.weight"][0, 0] = value
    safetensors.torch.save_file(tensors, run / "model.safetensors")
    refused(commands, run, arguments, "NaN or infinity")


@READERS
def test_weights_of_another_network(
    commands: Commands, run: Path, other_run: Path, arguments: tuple[str, ...]
) -> None:
    shutil.copy(other_run / "model.safetensors", run / "model.safetensors")
    refused(commands, run, arguments, "do not belong to mlp")


@READERS
@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ("", "model.json is damaged"),
        ("{", "model.json is damaged"),
        ("[]", "model.json"),
        ('{"format": 99}', "newer"),
        ('{"format": 1}', "missing"),
    ],
)
def test_a_damaged_architecture(
    commands: Commands, run: Path, arguments: tuple[str, ...], content: str, fragment: str
) -> None:
    (run / "model.json").write_text(content)
    refused(commands, run, arguments, "model.json", fragment)


@READERS
def test_a_missing_architecture(commands: Commands, run: Path, arguments: tuple[str, ...]) -> None:
    (run / "model.json").unlink()
    refused(commands, run, arguments, "model.json")


@pytest.mark.parametrize("arguments", [ATTACK, CERTIFY], ids=["attack", "certify"])
def test_a_run_folder_with_another_network_in_it(
    commands: Commands, run: Path, other_run: Path, arguments: tuple[str, ...]
) -> None:
    """Settings of one network and the files of another: results would be called the wrong one."""
    for name in ("model.json", "model.safetensors"):
        shutil.copy(other_run / name, run / name)
    refused(commands, run, arguments, "another network")


# --- the certification ------------------------------------------------------------------------


@pytest.fixture
def certified(commands: Commands, run: Path) -> Path:
    outcome = commands.run(*CERTIFY, cwd=run.parent)
    assert outcome.code == 0, outcome.err
    return run


def test_a_damaged_line_in_the_journal(commands: Commands, certified: Path) -> None:
    path = certified / "certification.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:30] + "\n", *lines[5:]]))
    refused(commands, certified, CERTIFY, "certification.jsonl is damaged at line 5", "--force")
    assert commands.run(*CERTIFY, "--force", cwd=certified.parent).code == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"settings": []}'])
def test_a_damaged_summary(commands: Commands, certified: Path, content: str) -> None:
    (certified / "certification.json").write_text(content)
    refused(commands, certified, CERTIFY, "certification.json")


def test_the_certification_of_other_weights(
    commands: Commands, certified: Path, other_run: Path
) -> None:
    """The network was trained again, with another seed."""
    again = ("train", "--out", "again", *SMALL, "--seed", "1")
    assert commands.run(*again, cwd=certified.parent).code == 0
    shutil.copy(certified.parent / "again" / "model.safetensors", certified)
    refused(commands, certified, CERTIFY, "weights", "--force")


def test_the_certification_of_another_seed(commands: Commands, certified: Path) -> None:
    refused(commands, certified, (*CERTIFY, "--seed", "2"), "seed", "--force")
    summary = json.loads((certified / "certification.json").read_text())
    assert summary["settings"]["seed"] == 0


def test_another_radius_is_added(commands: Commands, certified: Path) -> None:
    before = (certified / "certification.jsonl").read_bytes()
    outcome = commands.run(*CERTIFY, "--eps", "0.2", cwd=certified.parent)
    assert outcome.code == 0, outcome.err
    summary = json.loads((certified / "certification.json").read_text())
    assert summary["settings"]["eps"] == "0.01"
    assert [point["eps"] for point in summary["curve"]] == ["0.01", "0.2"]
    assert (certified / "certification.jsonl").read_bytes().startswith(before)
