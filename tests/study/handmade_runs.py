"""Run folders made by hand, for analyses whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def make_run(
    folder: Path,
    name: str,
    *,
    accuracies: tuple[float, float, float] | None = (90.0, 80.0, 70.0),
    by_ibp: float = 50.0,
    by_crown: float = 5.0,
    samples: int = 1000,
    margins: dict[str, Sequence[float]] | None = None,
    exact: Sequence[dict[str, Any]] = (),
    splits: dict[int, float] | None = None,
    training: float = 100.0,
    certifying: float = 10.0,
    method: str = "taps",
    data: str = "mnist",
    eps: str = "0.1",
) -> Path:
    """Write what the analyses read of a finished run; accuracies in %."""
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'data = "{data}"\nmethod = "{method}"\n')
    (run / "history.jsonl").write_text(json.dumps({"epoch": 0, "seconds": training}) + "\n")
    if accuracies is not None:
        natural, adversarial, certified = (value / 100 for value in accuracies)
        write(
            run / "certification.json",
            {
                "samples": samples,
                "complete": True,
                "verified": round(certified * samples),
                "falsified": round((1 - adversarial) * samples),
                "open": 0,
                "natural": natural,
                "adversarial": adversarial,
                "certified": certified,
                "unknown": round((adversarial - certified) * samples),
                "seconds": certifying,
                "stages": {
                    name: {"verified": round(share * samples / 100), "falsified": 0, "seconds": 1.0}
                    for name, share in (("ibp", by_ibp), ("crown-ibp", by_crown))
                },
                "settings": {"eps": eps},
            },
        )
    if margins is not None:
        settings = {"eps": eps}
        write(run / "margins.json", {"settings": settings, "margins": {**margins}})
    if exact:
        lines = [{"eps": eps}, *exact]
        (run / "exact.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if splits is not None:
        accuracy = {str(k): value / 100 for k, value in splits.items()}
        write(run / "splits.json", {"accuracies": accuracy})
    return run


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def robust(percent: float, samples: int = 1000) -> list[float]:
    """Return margins of which so many are negative, the first ones."""
    count = round(percent * samples / 100)
    return [-1.0] * count + [1.0] * (samples - count)
