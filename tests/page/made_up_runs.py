"""Run folders with made-up results, and pages read back."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tightrope import nets
from tightrope.answer import Verdict
from tightrope.runs import Run
from tightrope.runs.journal import Record
from tightrope.runs.summary import summarize
from tightrope.training.settings import Settings

SHAPE = (1, 4, 4)
NETWORK = {"width": 4, "depth": 1, "batch_norm": False}
STAGES = ["ibp", "attack", "bab"]
EPOCHS = 4

VOID = {"br", "img", "input", "meta"}


def write_data(path: Path, samples: int = 12, classes: int = 3) -> np.ndarray:
    """Write a data set of small images whose labels go round; returns the test images."""
    generator = np.random.default_rng(0)
    x = generator.uniform(0.2, 0.8, (samples, *SHAPE)).astype(np.float32)
    y = np.arange(samples) % classes
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    return x


def write_run(folder: Path, *, certified: bool = True, epochs: int = EPOCHS, **given: Any) -> Run:
    """Write a run folder that looks as if it was trained, and certified on all samples."""
    folder.mkdir(parents=True)
    x = write_data(folder / "data.npz")
    values = {"data": str(folder / "data.npz"), "net": "mlp", "device": "cpu", "epochs": EPOCHS}
    settings = Settings.parse({**values, "annealing_epochs": 1, **given})
    resolved = settings.resolve(normalize=False, network=NETWORK)
    run = Run(folder)
    run.config.write_text(resolved.to_toml())
    run.write_history([_epoch(number) for number in range(epochs)])
    torch.manual_seed(0)
    architecture = nets.Architecture("mlp", SHAPE, 3, None, NETWORK)
    nets.save(architecture.build(), architecture, folder)
    if certified:
        write_certification(run, x)
    return run


def _epoch(number: int) -> dict[str, Any]:
    return {
        "epoch": number,
        "radius": 0.1 * min(number, 1),
        "learning_rate": 5e-4,
        "loss": 2.0 / (number + 1),
        "natural": 0.5 + 0.1 * number,
        "robust": 0.4 + 0.1 * number,
        "seconds": 1.5,
        "validation_natural": 0.5 + 0.1 * number,
        "validation_robust": 0.3 + 0.1 * number,
    }


def write_certification(run: Run, x: np.ndarray) -> None:
    """Write verdicts of every kind: 6 verified, 2 refuted, 1 wrong from the start, 3 unknown."""
    records = [_record(run, index, x[index]) for index in range(len(x))]
    run.journal.write_text("".join(record.to_line() for record in records))
    settings = {
        "eps": "0.1",
        "start": 0,
        "samples": len(x),
        "stages": STAGES,
        "timeout": 60.0,
        "steps": 20,
        "restarts": 2,
        "seed": 0,
        **run.fingerprints(),
    }
    summary = summarize(records, len(x), settings)
    run.certification.write_text(json.dumps(summary.to_json()))


def _record(run: Run, index: int, image: np.ndarray) -> Record:
    label = index % 3
    times = {"natural": 0.001, "ibp": 0.002}
    common = {"index": index, "label": label, "prediction": label, "seconds": 0.003}
    if index < 6:
        return Record(
            **common, verdict=Verdict.VERIFIED, stage="ibp", margin=0.5 + index, times=times
        )
    if index < 8:
        run.counterexamples.mkdir(exist_ok=True)
        name = f"counterexamples/{index:06d}.npy"
        np.save(run.folder / name, image + np.float32(0.1) * (-1) ** index)
        return Record(
            **common,
            verdict=Verdict.FALSIFIED,
            stage="attack",
            margin=-0.5,
            times=times,
            counterexample=name,
        )
    if index == 8:
        common["prediction"] = (label + 1) % 3
        return Record(
            **common, verdict=Verdict.FALSIFIED, stage="natural", margin=-1.0, times=times
        )
    return Record(
        **common,
        verdict=Verdict.UNKNOWN,
        stage="bab",
        margin=-0.1,
        times=times,
        reason="time is up: 60 s",
    )


class Page(HTMLParser):
    """A page taken apart: checks that its elements are balanced, and collects them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        kind = {"script": self.scripts, "style": self.styles}.get(inside, self.pieces)
        kind.append(data)

    @property
    def text(self) -> str:
        """What a reader sees, in one line."""
        return " ".join("".join(self.pieces).split())

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Return the attributes of elements of a kind."""
        return [
            found
            for name, found in self.elements
            if name == tag and all(found.get(k.rstrip("_")) == v for k, v in attributes.items())
        ]
