"""`tightrope.certify`: verdicts for the samples of a run, journalled as they come."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tightrope.api.evaluation import Examination, check_attack, examine
from tightrope.certification.cascade import decide
from tightrope.certification.journal import Journal, Record
from tightrope.certification.stages import STAGES, AttackSettings, Subject, make_stages
from tightrope.certification.summary import Certification, summarize
from tightrope.errors import UserError, unknown_name
from tightrope.files import read_json, write_atomically, write_json
from tightrope.radius import Radius, format_radius
from tightrope.runs import Run, open_run

BATCH = 250

Progress = Callable[[Certification], None]


def certify(
    run: Run | str | Path,
    *,
    eps: Radius | None = None,
    samples: int | None = None,
    start: int = 0,
    stages: Sequence[str] = STAGES,
    steps: int = 200,
    restarts: int = 5,
    seed: int = 0,
    device: str | None = None,
    force: bool = False,
    progress: Progress = lambda summary: None,
) -> Certification:
    """Certify test samples of a run; write `certification.jsonl` and `certification.json`.

    A certification that was interrupted continues where it stopped. One with other settings,
    or of other weights, is an error unless `force` discards it. `steps` and `restarts` belong
    to the attack stage. `progress` gets the summary so far after each batch.
    """
    run = open_run(run)
    for name in stages:
        if name not in STAGES:
            raise unknown_name("stage", name, STAGES)
    if not stages or len(set(stages)) < len(stages):
        raise UserError(f"stages must be different names out of: {', '.join(STAGES)}")
    check_attack(steps, restarts, seed)
    examination = examine(run, eps, samples, start, device)
    settings = {
        "eps": format_radius(examination.eps),
        "start": start,
        "samples": len(examination.indices),
        "stages": list(stages),
        "steps": steps,
        "restarts": restarts,
        "seed": seed,
        "weights": run.fingerprint(),
    }
    if force or not run.journal.exists():
        run.clear_certification()  # without a journal, what else is there is a remnant
    run.tidy()
    records = _earlier_records(run, settings, examination.indices.tolist())
    # Written before the first sample, so that a journal always has its settings beside it.
    write_json(
        run.certification, summarize(records.values(), len(examination.indices), settings).to_json()
    )
    return _Session(run, examination, settings, records).run_batches(progress)


def _earlier_records(
    run: Run, settings: dict[str, Any], indices: Sequence[int]
) -> dict[int, Record]:
    if not run.journal.exists() or not run.journal.stat().st_size:
        return {}
    summary = read_json(run.certification, "the summary of the certification")
    before = summary.get("settings") if isinstance(summary, dict) else None
    if not isinstance(before, dict):
        raise UserError(f"{run.certification} is damaged; start over with --force")
    changed = [name for name in settings if before.get(name) != settings[name]]
    if changed:
        raise UserError(
            f"{run.folder} was certified with other settings ({', '.join(changed)}); "
            "repeat those, or start over with --force"
        )
    return Journal(run.journal).read(set(indices))


class _Session:
    """One certification, tied to its run folder."""

    def __init__(
        self,
        run: Run,
        examination: Examination,
        settings: dict[str, Any],
        records: dict[int, Record],
    ) -> None:
        self.run, self.examination, self.settings = run, examination, settings
        self.records = records
        self.subject = Subject(examination.module, examination.input_shape)
        attack = AttackSettings(settings["steps"], settings["restarts"])
        self.stages = make_stages(tuple(settings["stages"]), attack)

    def run_batches(self, progress: Progress) -> Certification:
        """Decide all samples that are still open, batch by batch."""
        total = len(self.examination.indices)
        with Journal(self.run.journal) as journal:
            for first in range(0, total, BATCH):
                indices, x, labels = self.examination.batch(first, first + BATCH)
                if all(i in self.records for i in indices.tolist()):
                    continue
                # The whole batch runs again even if only some are missing: same numbers as
                # without the interruption.
                for record in decide(
                    self.subject,
                    indices,
                    x,
                    labels,
                    eps=self.examination.eps,
                    stages=self.stages,
                    keep=self._keep,
                    seed=self.settings["seed"],
                ):
                    if record.index not in self.records:
                        self.records[record.index] = record
                        journal.append(record)
                progress(self.summary())
        summary = self.summary()
        assert summary.verified + summary.falsified + summary.unknown == total
        write_json(self.run.certification, summary.to_json())
        return summary

    def summary(self) -> Certification:
        """Summarise what is known so far."""
        total = len(self.examination.indices)
        return summarize(self.records.values(), total, self.settings)

    def _keep(self, index: int, point: Tensor) -> str:
        """Store a counterexample and return its name relative to the run folder."""
        path = self.run.counterexamples / f"{index:06d}.npy"
        buffer = io.BytesIO()
        np.save(buffer, point.cpu().numpy(), allow_pickle=False)
        write_atomically(path, lambda temporary: temporary.write_bytes(buffer.getvalue()))
        return f"{self.run.counterexamples.name}/{path.name}"
