"""`compare` with methods that learn from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tightrope as tr
from tightrope.study.experiments import EXPERIMENTS
from tightrope.study.plans import Plan
from tightrope.study.remaining import unfinished
from tightrope.study.runner import carry_out_all
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


def test_runs_are_made_after_those_that_they_learn_from(tmp_path: Path) -> None:
    """The student is asked for first, and takes longer."""
    certify = {"eps": "0.01", "samples": 10, "stages": ("ibp",)}
    student = {**SETTINGS, "ad-cert.steps": 1}
    plans = [
        Plan(
            *("student", "laptop/mnist-0.1-cnn3-ad-cert", student),
            **{"certify": certify, "minutes": 9, "teacher": "teacher"},
        ),
        Plan("teacher", "laptop/mnist-0.1-cnn3-pgd", SETTINGS, certify=certify),
    ]
    session = carry_out_all(plans, tmp_path, jobs=2, threads=1)
    assert not session.failures and [*session.seconds] == ["teacher", "student"]
    made = tr.Run(tmp_path / "runs" / "student")
    assert made.settings().teacher == str(tmp_path / "runs" / "teacher")
    assert not unfinished(plans[0], made.folder)
    alone = carry_out_all(plans[:1], tmp_path / "alone", jobs=1, threads=1)
    assert "teacher, which it learns from, is not on this machine" in alone.failures["student"]
