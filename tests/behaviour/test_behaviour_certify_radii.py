"""`tightrope certify` with several radii, more samples, and networks from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import Commands, assert_refused, json_lines
from onnx_files import random_layers, write_onnx

QUICK = ("--steps", "5", "--restarts", "1")


def test_a_curve(commands: Commands, run: Path) -> None:
    options = ("certify", run, "--samples", "30", *QUICK)
    assert commands.run(*options).code == 0
    before = (run / "certification.jsonl").read_bytes()
    outcome = commands.run(*options, "--eps", "0.005,0.01,0.05")
    assert (outcome.code, outcome.err) == (0, "")
    assert "by radius" in outcome.out and "0.005" in outcome.out
    assert (run / "certification.jsonl").read_bytes().startswith(before)
    summary = json.loads((run / "certification.json").read_text())
    assert [point["eps"] for point in summary["curve"]] == ["0.005", "0.01", "0.05"]
    assert summary["settings"]["eps"] == "0.01"
    shares = [point["certified"] for point in summary["curve"]]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    again = commands.run(*options, "--eps", "0.005,0.01,0.05", "--json")
    assert again.json["curve"] == summary["curve"]
    assert commands.run("report", run).code == 0
    assert "By radius" in (run / "report.html").read_text()


def test_more_samples(commands: Commands, run: Path) -> None:
    assert commands.run("certify", run, "--samples", "10", *QUICK).code == 0
    before = json_lines(run / "certification.jsonl")
    outcome = commands.run("certify", run, "--samples", "25", *QUICK, "--json")
    assert outcome.json["samples"] == 25
    after = json_lines(run / "certification.jsonl")
    assert after[:10] == before and len(after) == 25
    outcome = commands.run("certify", run, "--start", "100", "--samples", "5", *QUICK, "--json")
    assert outcome.json["samples"] == 5
    summary = json.loads((run / "certification.json").read_text())
    assert summary["samples"] == 30 and summary["complete"]


def test_another_norm(commands: Commands, run: Path) -> None:
    options = ("--samples", "10", *QUICK, "--norm", "l2")
    for command in ("certify", "attack"):
        assert_refused(commands.run(command, run, *options), "eps is missing")
    outcome = commands.run("certify", run, *options, "--eps", "0.1,1.5")
    assert (outcome.code, outcome.err) == (0, "") and "(l2)" in outcome.out
    assert json.loads((run / "certification.json").read_text())["settings"]["norm"] == "l2"
    refused = commands.run("certify", run, "--samples", "10", *QUICK, "--eps", "0.1")
    assert_refused(refused, "other settings (norm)")
    attacked = commands.run("attack", run, *options, "--eps", "1.5", "--json").json
    assert attacked["settings"]["norm"] == "l2"
    curve = json.loads((run / "certification.json").read_text())["curve"]
    assert attacked["adversarial"] >= curve[1]["certified"]
    assert commands.run("report", run).code == 0
    text = (run / "report.html").read_text()
    assert "By radius (l2)" in text and "1.5 (l2)" in text


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """A folder with a network that was trained elsewhere, and samples."""
    write_onnx(tmp_path / "net.onnx", *random_layers([3, 8, 4]))
    random = np.random.default_rng(0)
    x = random.random((12, 3)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x_test=x, y_test=random.integers(0, 4, 12))
    return tmp_path


def test_a_network_from_elsewhere(commands: Commands, brought: Path) -> None:
    options = ("certify", "net.onnx", "--data", "samples.npz", "--out", "results", *QUICK)
    outcome = commands.run(*options, "--eps", "0.01", "--samples", "6", cwd=brought)
    assert (outcome.code, outcome.err) == (0, "")
    before = (brought / "results" / "certification.jsonl").read_bytes()
    outcome = commands.run(*options, "--eps", "0.01,0.1", cwd=brought)
    assert outcome.code == 0 and "by radius" in outcome.out
    assert (brought / "results" / "certification.jsonl").read_bytes().startswith(before)
    outcome = commands.run("report", "results", cwd=brought)
    assert outcome.code == 0 and "note:" not in outcome.out
    page = (brought / "results" / "report.html").read_text()
    assert "net.onnx" in page and "tightrope certify net.onnx" in page


def test_refusals(commands: Commands, brought: Path) -> None:
    data, out = ("--data", "samples.npz"), ("--out", "results")
    eps = ("--eps", "0.1")
    for arguments, message in (
        ((*data, *eps), "--out is missing"),
        ((*out, *eps), "data is missing"),
        ((*data, *out), "eps is missing"),
        ((*data, *out, "--eps", "0.1,0.1"), "eps must be different radii"),
        ((*data, *out, *eps, "--domain", "wide"), "--domain must be LOW,HIGH or none"),
        ((*data, *out, *eps, "--samples", "99"), "samples must lie in"),
        (("--data", "net.onnx", *out, *eps), "must be an .npz file"),
    ):
        assert_refused(commands.run("certify", "net.onnx", *arguments, cwd=brought), message)
    assert not (brought / "results").exists()
    free = commands.run("certify", "net.onnx", *data, *out, *eps, "--domain", "none", cwd=brought)
    assert free.code == 0
