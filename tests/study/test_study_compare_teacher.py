"""`compare` with methods that learn from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tightrope as tr

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
