"""Bad input: one clear line, exit code 2, and nothing made or changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from badfiles import write_npz
from commands import SMALL, Commands, assert_refused, run_script, unchanged


@pytest.fixture
def place(finished_run: Path, tmp_path: Path) -> Path:
    """A working directory with a trained run, some data and some other things in it."""
    folder = tmp_path / "place"
    folder.mkdir()
    shutil.copytree(finished_run, folder / "run")
    (folder / "file").write_text("a file")
    (folder / "empty").mkdir()
    (folder / "untrained").mkdir()
    shutil.copy(finished_run / "config.toml", folder / "untrained" / "config.toml")
    write_npz(folder / "good.npz")
    return folder


# --- arguments ----------------------------------------------------------------------------------

GOOD = ["--data", "good.npz", "--set", "train_samples=64", "--set", "validation=8"]
GOOD += ["--set", "depth=none"]

# Arguments of `train`, and what the message says.
TRAIN = [
    # names, with the nearest match
    (["--method", "ipb"], "unknown method 'ipb'; did you mean 'ibp'?"),
    (["--method", ""], "unknown method ''"),
    (["--method", "ibp "], "did you mean 'ibp'?"),
    (["--net", "cnn8"], "did you mean 'cnn7'?"),
    (["--net", "Mlp"], "did you mean 'mlp'?"),
    (["--net", "transformer"], "choose one of: cnn3"),
    (["--data", "mnst"], "unknown data set 'mnst'; did you mean 'mnist'?"),
    (["--data", "CIFAR-10"], "did you mean 'cifar10'?"),
    (["--preset", ""], "unknown preset ''"),
    (["--preset", "demmo"], "unknown preset 'demmo'; did you mean 'demo'?"),
    (["--preset", "paper/tiny-ipb"], "did you mean 'paper/tiny-ibp'?"),
    (["--set", "batchsize=3"], "unknown setting 'batchsize'; did you mean 'batch_size'?"),
    (["--set", "lerning_rate=1"], "did you mean 'learning_rate'?"),
    (["--set", "options=1"], "unknown setting 'options'"),
    (["--method", "pgd", "--set", "pgd.step=3"], "did you mean 'pgd.steps'?"),
    (["--set", "pgd.steps=3"], "belongs to method 'pgd'"),
    # options of the methods that join bounds and attacks
    (
        ["--method", "taps", "--set", "taps.classifier_relus=7"],
        "no split with 7 ReLUs in the classifier; possible numbers: 0, 1",
    ),
    (["--method", "taps", "--set", "taps.connector=1.5"], "taps.connector must be between 0 and 1"),
    (["--method", "taps", "--set", "taps.weight=-1"], "taps.weight must be at least 0"),
    (["--method", "taps", "--set", "taps.steps=0"], "taps.steps must be at least 1"),
    (["--method", "taps", "--set", "taps.estimators=two"], "one of multi, single"),
    (["--method", "taps", "--set", "taps.wieght=2"], "did you mean 'taps.weight'?"),
    (["--method", "staps", "--set", "staps.ratio=0"], "staps.ratio must be above 0"),
    (["--method", "sabr", "--set", "sabr.ratio=1.1"], "sabr.ratio must be above 0 and at most 1"),
    (["--method", "mtl-ibp", "--set", "mtl.alpha=2"], "mtl.alpha must be between 0 and 1"),
    (["--method", "mtl-ibp", "--set", "taps.steps=3"], "belongs to method 'taps'"),
    (["--set", "ibp.weight=3"], "takes no options"),
    (["--set", "hidden=3"], "'hidden'"),
    # names of the function's own arguments, which are no settings
    (["--set", "out=elsewhere"], "unknown setting 'out'"),
    (["--set", "resume=true"], "unknown setting 'resume'"),
    (["--set", "force=true"], "unknown setting 'force'"),
    (["--set", "preset=demo"], "unknown setting 'preset'"),
    (["--set", "progress=1"], "unknown setting 'progress'"),
    # more than a float32 holds
    (["--set", "learning_rate=1e39"], "learning_rate must be a number above 0 and at most 1e+30"),
    (["--set", "weight_decay=1e39"], "at most 1e+30"),
    # one sample has no statistics
    (["--set", "train_samples=65", "--set", "batch_norm=true"], "at least two training samples"),
    # radii
    (["--eps", "0"], "(0, 1]"),
    (["--eps", "-0.1"], "(0, 1]"),
    (["--eps", "1.0001"], "(0, 1]"),
    (["--eps", "256/255"], "(0, 1]"),
    (["--eps", "nan"], "eps"),
    (["--eps", "inf"], "eps"),
    (["--eps", "1/0"], "eps"),
    (["--eps", "a lot"], "such as 0.1 or 8/255"),
    (["--eps", ""], "eps"),
    (["--eps", "1e-400"], "eps"),
    (["--eps", "1e-99999999"], "eps"),
    (["--eps", "1e99999999"], "eps"),
    (["--set", "train_eps=2"], "train_eps"),
    (["--set", "train_eps=1e-400"], "train_eps"),
    # numbers
    (["--epochs", "0"], "epochs must be a whole number from 1 on"),
    (["--epochs", "two"], "epochs"),
    (["--epochs", "2.5"], "epochs"),
    (["--epochs", "²"], "epochs"),
    (["--epochs", "9" * 5000], "epochs"),
    (["--seed", "-1"], "seed"),
    (["--seed", "x"], "seed"),
    (["--seed", "1" + "0" * 30], "seed"),
    (["--seed", str(2**64)], "seed"),
    (["--set", "batch_size=1"], "batch_size"),
    (["--set", "batch_size=²"], "batch_size"),
    (["--set", "learning_rate=0"], "learning_rate"),
    (["--set", "learning_rate=nan"], "learning_rate"),
    (["--set", "learning_rate=inf"], "learning_rate"),
    (["--set", "clip=-1"], "clip"),
    (["--set", "momentum=2"], "momentum"),
    (["--set", "validation=1.5"], "validation"),
    (["--set", "validation=-1"], "validation"),
    (["--set", "validation=²"], "validation"),
    (["--set", "validation=1024"], "validation"),
    (["--set", "validation=0"], "validation"),  # nothing to select the best epoch on
    (["--set", "train_samples=0"], "train_samples"),
    (["--set", "train_samples=60001"], "60000"),
    (["--set", "decay_epochs=2,1"], "decay_epochs"),
    (["--set", "decay_epochs=a"], "decay_epochs"),
    (["--set", "annealing_epochs=4"], "annealing_epochs"),
    (["--set", "annealing=fast"], "annealing must be one of smooth, linear, constant"),
    (["--set", "optimizer=adem"], "optimizer"),
    (["--set", "select=worst"], "select"),
    (["--set", "batch_norm=maybe"], "batch_norm must be true or false"),
    (["--set", "accumulate=65"], "accumulate"),
    (["--set", "width=0"], "width"),
    (["--set", "width=65537"], "65536"),
    (["--set", "width=1000000000000"], "width"),
    (["--set", "width"], "KEY=VALUE"),
    (["--set", "=3"], "KEY=VALUE"),
    (["--method", "pgd", "--set", "pgd.steps=0"], "pgd.steps"),
    (["--method", "pgd", "--set", "pgd.steps=many"], "pgd.steps"),
    (["--method", "pgd", "--set", "pgd.step_size=-1"], "pgd.step_size"),
    # devices
    (["--device", "abacus"], "device 'abacus'"),
    (["--device", "cuda:99"], "device 'cuda:99'"),
    (["--device", "meta"], "device 'meta'"),
    (["--device", ""], "device"),
    # data
    (["--data", "missing.npz"], "missing.npz does not exist"),
    (["--data", "file"], "file"),
    (["--data", "empty"], "train is missing"),
    (["--data", ""], "tightrope: "),
    (["--data", "cifar10", "--data-dir", "empty"], "tightrope data fetch cifar10"),
    (["--data", "tinyimagenet", "--data-dir", "empty"], "tightrope data fetch tinyimagenet"),
    ([*GOOD, "--net", "cnn3"], "(channels, height, width)"),
    ([*GOOD, "--set", "train_samples=65"], "64"),
    ([*GOOD, "--set", "validation=64"], "64"),
    # options
    (["--resume", "--force"], "--resume"),
    (["--epochs"], "--epochs"),
    (["--epoch", "3"], "--epochs"),
    (["extra"], "extra"),
]


@pytest.mark.parametrize(("arguments", "fragment"), TRAIN)
def test_train(commands: Commands, place: Path, arguments: list[str], fragment: str) -> None:
    with unchanged(place):
        outcome = commands.run("train", "--out", "new", *SMALL, *arguments, cwd=place)
        assert_refused(outcome, fragment)


# Complete arguments, and what the message says.
OTHERS = [
    (["trian"], "unknown command 'trian'; did you mean 'train'?"),
    (["--jsn"], "--jsn"),
    (["data", "lst"], "list"),
    (["data", "fetch"], "NAME"),
    (["data", "fetch", "cifar"], "did you mean 'cifar10'?"),
    (["nets", "extra"], "extra"),
    # the run folder
    (["train"], "--out"),
    (["train", "--out", "file", *SMALL], "file is a file"),
    (["train", "--out", "file/run", *SMALL], "file/run"),
    (["train", "--out", "a" * 300, *SMALL], "too long"),
    (["train", "--out", "", *SMALL], "--out"),
    (["train", "--out", "run", *SMALL], "--resume"),
    (["train", "--out", "run"], "--force"),
    (["train", "--out", "run", "--resume", "--net", "cnn3"], "other settings (net"),
    (["train", "--out", "run", "--resume", "--epochs", "9"], "other settings (epochs)"),
    (["train", "--out", "run", "--resume", "--eps", "0.2"], "other settings (eps"),
    (["train", "--out", "run", "--resume", "--method", "ipb"], "did you mean 'ibp'?"),
    (["train", "--out", "run", "--resume", "--method", "pgd"], "method"),
    (["train", "--out", "run", "--resume", "--set", "foo=1"], "unknown setting 'foo'"),
    (["train", "--out", "run", "--force", "--net", "cnn8"], "did you mean 'cnn7'?"),
    (["train", "--out", "run", "--force", "--data", "missing.npz"], "does not exist"),
]
for command, rest in (("attack", []), ("certify", []), ("export", ["--onnx", "new.onnx"])):
    OTHERS += [
        ([command, "missing", *rest], "missing is not a folder"),
        ([command, "file", *rest], "file is not a folder"),
        ([command, "empty", *rest], "no config.toml"),
        ([command, "untrained", *rest], "no trained network"),
        ([command, *rest], "RUN"),
        ([command, "run", "run", *rest], "run"),
        ([command, "run", *rest, "--bogus"], "--bogus"),
    ]
for command in ("attack", "certify"):
    OTHERS += [
        ([command, "run", "--eps", "0"], "(0, 1]"),
        ([command, "run", "--eps", "1.1"], "(0, 1]"),
        ([command, "run", "--eps", "8/0"], "eps"),
        ([command, "run", "--samples", "0"], "samples"),
        ([command, "run", "--samples", "10001"], "[1, 10000]"),
        ([command, "run", "--samples", "x"], "--samples"),
        ([command, "run", "--start", "10000"], "start"),
        ([command, "run", "--start", "-1"], "start"),
        ([command, "run", "--start", "9999", "--samples", "2"], "[1, 1]"),
        ([command, "run", "--steps", "0"], "steps"),
        ([command, "run", "--restarts", "0"], "restarts"),
        ([command, "run", "--samples", "2", "--seed", "1" + "0" * 30], "seed"),
        ([command, "run", "--samples", "2", "--seed", "-" + "9" * 30], "seed"),
        ([command, "run", "--device", "abacus"], "device 'abacus'"),
    ]
OTHERS += [
    (["certify", "run", "--stages", "ibp,atack"], "unknown stage 'atack'; did you mean 'attack'?"),
    (["certify", "run", "--stages", "ibp,ibp"], "stages"),
    (["certify", "run", "--stages", ""], "stage"),
    (["certify", "run", "--stages", ","], "stage"),
    (["export", "run"], "--onnx"),
    (["export", "run", "--onnx", ""], "onnx"),
    (["export", "run", "--onnx", "empty"], "empty"),
]


@pytest.mark.parametrize(("arguments", "fragment"), OTHERS)
def test_other_commands(
    commands: Commands, place: Path, arguments: list[str], fragment: str
) -> None:
    with unchanged(place):
        assert_refused(commands.run(*arguments, cwd=place), fragment)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--out", "new", "--net", "cnn8"],
        ["certify", "run", "--eps", "2"],
        ["attack", "missing"],
        ["export", "empty", "--onnx", "new.onnx"],
    ],
)
def test_json_does_not_change_how_errors_look(
    commands: Commands, place: Path, arguments: list[str]
) -> None:
    plain = commands.run(*arguments, cwd=place)
    with_json = commands.run(*arguments, "--json", cwd=place)
    assert_refused(with_json)
    assert (with_json.code, with_json.err) == (plain.code, plain.err)


def test_the_installed_script_refuses_just_the_same(place: Path) -> None:
    """One case in a real process, whose import might print something."""
    with unchanged(place):
        outcome = run_script("train", "--out", "new", "--net", "cnn8", cwd=place)
        assert_refused(outcome, "unknown network 'cnn8'; did you mean 'cnn7'?")


# --- folders that exist -----------------------------------------------------------------------


def test_an_existing_run_is_not_touched(commands: Commands, run: Path) -> None:
    with unchanged(run):
        assert_refused(commands.run("train", "--out", run, *SMALL), str(run), "--resume", "--force")


@pytest.mark.parametrize(
    "name", ["notes.txt", "model.safetensors", "checkpoint.pt", "certification.jsonl"]
)
def test_a_folder_with_other_things_in_it_is_not_touched(
    commands: Commands, tmp_path: Path, name: str
) -> None:
    """A mistyped --out must not delete somebody's checkpoint.pt."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / name).write_bytes(b"the work of weeks")
    with unchanged(folder):
        assert_refused(commands.run("train", "--out", folder, *SMALL), "--force")


@pytest.mark.parametrize("left", [(), ("model.safetensors",), ("model.safetensors", "model.json")])
def test_a_run_killed_in_its_first_epoch_is_a_run(
    commands: Commands, run: Path, left: tuple[str, ...]
) -> None:
    """It has no checkpoint yet, but what is there can be resumed, and the message says so."""
    for path in run.iterdir():
        if path.name not in ("config.toml", "history.jsonl", *left):
            path.unlink()
    with unchanged(run):
        assert_refused(commands.run("train", "--out", run, *SMALL), "--resume")
    assert commands.run("train", "--out", run, *SMALL, "--resume").code == 0


def test_resume_does_not_delete_files_that_belong_to_no_run(
    commands: Commands, tmp_path: Path
) -> None:
    """Without a config.toml there is nothing to resume, and a checkpoint.pt is somebody else's."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes(b"the work of weeks")
    with unchanged(folder):
        assert_refused(commands.run("train", "--out", folder, *SMALL, "--resume"), "checkpoint.pt")


def test_an_empty_folder_will_do(commands: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert commands.run("train", "--out", folder, *SMALL, "--epochs", "2").code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    outcome = commands.run("train", "--out", tmp_path / "locked" / "run", *SMALL)
    assert_refused(outcome, "denied", "locked")
