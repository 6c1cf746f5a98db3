"""`compare` with methods that learn from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tightrope as tr
from tightrope.study import runner
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.plans import Plan
from tightrope.study.work import carry_out
from tightrope.training.objectives import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {
    **{"net": "mlp", "width": 4, "depth": 1, "batch_norm": False, "eps": 0.01, "epochs": 2},
    **{"annealing_epochs": 0, "decay_epochs": (), "train_samples": 200, "validation": 0},
    **{"select": "last", "batch_size": 100},
}


def test_only_those_that_learn_from_it_have_a_teacher(tmp_path: Path) -> None:
    teacher = tr.train(out=tmp_path / "teacher", method=tr.PGD(steps=2), **SETTINGS)
    given = {**SETTINGS, "teacher": str(teacher.folder), "ad-cert": {"steps": 2}}
    made = tr.compare(["ibp", "ad-cert"], out=tmp_path / "out", samples=10, **given)
    assert [len(entry.runs) for entry in made.entries] == [1, 1]
    plain, taught = (tr.Run(Path(entry.runs[0])).settings() for entry in made.entries)
    assert (plain.teacher, plain.teacher_weights) == (None, None)
    assert taught.teacher == str(teacher.folder)
    assert taught.teacher_weights == teacher.fingerprints()["weights"]


@pytest.mark.parametrize(
    ("methods", "given", "message"),
    [
        (["ibp", "cc-dist"], {}, "method 'cc-dist' needs a teacher: train one, for instance by"),
        (["ibp", "taps"], {"teacher": "x"}, "none of the methods ibp, taps learns from a teacher"),
    ],
)
def test_a_teacher_in_the_wrong_place(
    tmp_path: Path, methods: list[str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(tr.UserError, match=message):
        tr.compare(methods, out=tmp_path / "out", samples=10, **SETTINGS, **given)
    assert not (tmp_path / "out").exists()


def test_plans_name_the_run_that_they_learn_from(tmp_path: Path) -> None:
    plans = {plan.name: plan for plan in EXPERIMENTS["main"].plans("laptop")}
    students = [plan for plan in plans.values() if METHODS[plan.method].needs_teacher]
    assert {plan.method for plan in students} == {"ad-cert", "cc-dist"}
    for plan in plans.values():
        assert (plan.teacher is not None) == (plan in students)
    for plan in students:
        assert plan.teacher is not None
        assert plans[plan.teacher].method == "pgd"
        command = plan.commands(tmp_path / "runs" / plan.name)[0]
        assert f"teacher={tmp_path / 'runs' / plan.teacher}" in command


def test_runs_are_made_after_those_that_they_learn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The student is asked for first, and takes longer."""
    certify = {"eps": "0.01", "samples": 10, "stages": ("ibp",)}
    student = Plan(
        *("student", "laptop/mnist-0.1-cnn3-ad-cert", {**SETTINGS, "ad-cert.steps": 1}),
        **{"certify": certify, "minutes": 9, "teacher": "teacher"},
    )
    teacher = Plan("teacher", "laptop/mnist-0.1-cnn3-pgd", SETTINGS, certify=certify)
    waves = []

    def make(task: Any, plans: list[Plan], watcher: Any, **_: Any) -> None:
        """Make runs in this process."""
        waves.append([plan.name for plan in plans])
        for plan in plans:
            carry_out(plan, tmp_path / "runs" / plan.name, watch=lambda *_: None)

    monkeypatch.setattr(runner, "run_in_processes", make)
    with pytest.raises(tr.UserError, match="teacher, which it learns from, is not on this machine"):
        make(None, [student], None)
    runner.carry_out_all([student, teacher], tmp_path, jobs=2, threads=1)
    assert waves[1:] == [["teacher"], ["student"]]
    made = tr.Run(tmp_path / "runs" / "student")
    assert made.settings().teacher == str(tmp_path / "runs" / "teacher")
    runner.carry_out_all([student, teacher], tmp_path, jobs=2, threads=1)
    assert len(waves) == 3  # nothing is left to do
