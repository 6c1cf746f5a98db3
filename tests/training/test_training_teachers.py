"""Which networks may teach, and that a training goes on with the same one only."""

from pathlib import Path

import pytest
import torch

import tightrope as tr
from tightrope import nets
from tightrope.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = {
    "net": "mlp",
    "width": 8,
    "depth": 1,
    "batch_norm": True,
    "eps": 0.02,
    "epochs": 2,
    "train_samples": 256,
    "validation": 32,
    "batch_size": 32,
    "annealing_epochs": 0,
}
STUDENT = {**SMALL, "method": "ad-cert", "ad-cert.steps": 2}


@pytest.fixture(scope="module")
def robust(tmp_path_factory):
    """A teacher."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    return tr.train(out=out, method=tr.PGD(steps=2), **SMALL)


def test_the_fingerprint_of_the_teacher_is_a_setting(robust, tmp_path):
    before = robust.weights.read_bytes()
    run = tr.train(out=tmp_path / "student", teacher=str(robust.folder), **STUDENT)
    assert run.settings().teacher == str(robust.folder)
    assert run.settings().teacher_weights == robust.fingerprints()["weights"]
    assert robust.weights.read_bytes() == before
    assert all(0 <= record["validation_robust"] <= 1 for record in run.history())
    again = tr.train(out=tmp_path / "again", teacher=robust, **STUDENT)
    assert again.weights.read_bytes() == run.weights.read_bytes()
    # What is read of a run later does not need the teacher any more.
    assert tr.estimate(run, samples=20, steps=2).samples == 20


class Stop(Exception):
    """The end of a training that is to be resumed."""


class Stopper:
    def step(self, epoch, iteration, result, radius):
        if (epoch, iteration) == (1, 3):
            raise Stop

    def epoch(self, record):
        pass


@pytest.mark.parametrize("method", ["ad-cert", "cc-dist"])
def test_a_training_resumes_with_its_teacher_only(robust, tmp_path, method):
    taught = tmp_path / "teacher"
    module, architecture = robust.network()
    nets.save(module, architecture, taught)
    (taught / "config.toml").write_bytes(robust.config.read_bytes())
    given = {**SMALL, "method": method, f"{method}.steps": 2, "teacher": str(taught)}
    whole = tr.train(out=tmp_path / "whole", **given)
    with pytest.raises(Stop):
        tr.train(out=tmp_path / "cut", progress=Stopper(), **given)
    with torch.no_grad():
        next(module.parameters()).add_(0.01)
    nets.save(module, architecture, taught)
    settings = (tmp_path / "cut" / "config.toml").read_bytes()
    for again in ({}, given):
        with pytest.raises(UserError, match="is not the one that this run began with") as caught:
            tr.train(out=tmp_path / "cut", resume=True, **again)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "cut" / "config.toml").read_bytes() == settings
    nets.save(robust.network()[0], architecture, taught)
    cut = tr.train(out=tmp_path / "cut", resume=True)
    assert cut.weights.read_bytes() == whole.weights.read_bytes()


def test_a_student_may_begin_as_its_teacher(robust, tmp_path):
    seen = []

    class First(Stopper):
        def step(self, *_):
            raise Stop

    class Watched(tr.ADCERT):
        name = "watched"

        def __call__(self, model, x, y, radius):
            seen.append((model.graph(x), model.teacher(x)))
            return super().__call__(model, x, y, radius)

    given = {**SMALL, "batch_norm": False, "teacher": str(tmp_path / "teacher")}
    plain = {**SMALL, "batch_norm": False, "epochs": 1}
    tr.train(out=tmp_path / "teacher", method=tr.PGD(steps=2), **plain)
    for initialization in ("teacher", "shi"):
        out = tmp_path / f"student-{initialization}"
        with pytest.raises(Stop):
            options = {**given, "initialization": initialization}
            tr.train(out=out, method=Watched(steps=2), progress=First(), **options)
    assert torch.equal(*seen[0]) and not torch.equal(*seen[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "ad-cert"},
            "method 'ad-cert' needs a teacher: .*-cnn3-pgd .* then set",
        ),
        ({"initialization": "teacher"}, "initialization = teacher needs a teacher"),
        ({"teacher": "TEACHER"}, "method 'ibp' learns from no teacher: leave out teacher"),
        ({"method": "cc-dist", "teacher": "nowhere"}, "nowhere is not a folder"),
        ({"method": "cc-dist", "teacher": "TEACHER", "width": 9}, "differs in arguments"),
        (
            {"method": "cc-dist", "teacher": "TEACHER", "normalize": True, "depth": 2},
            "differs in normalize, arguments",
        ),
        (
            {"method": "cc-dist", "teacher": "TEACHER", "teacher_weights": "0" * 16},
            "is not the one that this run began with: its weights are [0-9a-f]{16}, not 0{16}",
        ),
    ],
)
def test_what_is_refused(robust, tmp_path: Path, given, message):
    given = {k: str(robust.folder) if v == "TEACHER" else v for k, v in given.items()}
    with pytest.raises(UserError, match=message) as caught:
        tr.train(out=tmp_path / "run", **{**SMALL, **given})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
