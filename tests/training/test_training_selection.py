"""Which epoch of a training is kept."""

import pytest
from small_trainings import tiny, tiny_trainer, train

from tightrope.training import trainer as trainer_module
from tightrope.training.checkpoints import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


def select(monkeypatch, scores, **given):
    """Train with prescribed (natural, robust) accuracies; return selections and radii."""
    plan, radii = iter(scores), []

    def scripted(graph, objective, batches, radius, group, teacher):
        radii.append(radius)
        return next(plan)

    monkeypatch.setattr(trainer_module, "evaluate", scripted)
    trainer = tiny_trainer(epochs=len(scores), **given)
    _, selections = train(trainer, tiny(), tiny(1))
    return trainer, selections, radii


def robust(*values):
    return [(0.5, value) for value in values]


def test_best_is_chosen_at_the_full_radius_only(monkeypatch):
    scores = robust(0.9, 1.0, 0.3, 0.5, 0.4, 0.6, 0.2)
    trainer, selections, radii = select(monkeypatch, scores, annealing_epochs=2, eps=0.1)
    assert radii[0] < radii[1] < 0.1 and radii[2:] == [0.1] * 5
    # Until the full radius is reached, the latest weights are the ones to keep.
    assert selections == [True, True, True, True, False, True, False]
    assert (trainer.selected_epoch, trainer.best) == (5, 0.6)


def test_ties_keep_the_earlier_epoch(monkeypatch):
    given = {"annealing_epochs": 0, "eps": 0.1}
    trainer, selections, _ = select(monkeypatch, robust(0.4, 0.4, 0.7, 0.7, 0.4), **given)
    assert selections == [True, False, True, False, False]
    assert trainer.selected_epoch == 2


def test_zero_at_the_full_radius_beats_anything_before_it(monkeypatch):
    trainer, selections, _ = select(
        monkeypatch, robust(0.9, 0.0, 0.0, 0.1), annealing_epochs=1, eps=0.1
    )
    assert selections == [True, True, False, True]
    assert trainer.selected_epoch == 3


def test_the_best_so_far_survives_a_restart(monkeypatch, tmp_path):
    given = {"annealing_epochs": 0, "eps": 0.1, "epochs": 4}
    plan = iter(robust(0.3, 0.8, 0.5, 0.8))
    monkeypatch.setattr(trainer_module, "evaluate", lambda *_: next(plan))
    path = tmp_path / "c.pt"

    def stop(trainer, record, selected):
        save_checkpoint(trainer.checkpoint(), path)
        if record["epoch"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_trainer(**given).run(tiny(), tiny(1), on_epoch=stop)
    resumed = tiny_trainer(**given)
    resumed.restore(load_checkpoint(path))
    assert (resumed.best, resumed.selected_epoch) == (0.8, 1)
    _, selections = train(resumed, tiny(), tiny(1))
    assert selections == [False, False]
    assert resumed.selected_epoch == 1


def test_natural_accuracy_does_not_decide(monkeypatch):
    scores = [(0.2, 0.5), (0.9, 0.4), (0.1, 0.6)]
    _, selections, _ = select(monkeypatch, scores, annealing_epochs=0)
    assert selections == [True, False, True]


def test_natural_accuracy_decides_where_nothing_is_robust(monkeypatch):
    scores = [(0.2, None), (0.9, None), (0.9, None), (0.5, None)]
    trainer, selections, _ = select(monkeypatch, scores, method="standard")
    assert selections == [True, True, False, False]
    assert trainer.best == 0.9


def test_last_keeps_the_last(monkeypatch):
    scores = robust(0.9, 0.5, 0.1)
    trainer, selections, _ = select(monkeypatch, scores, annealing_epochs=0, select="last")
    assert selections == [True, True, True]
    assert trainer.selected_epoch == 2


def test_selection_on_the_test_set_follows_the_same_rule(monkeypatch):
    scores = robust(0.9, 0.5, 0.6)
    _, selections, _ = select(monkeypatch, scores, annealing_epochs=1, select="test")
    assert selections == [True, True, True]
    _, selections, _ = select(monkeypatch, scores, annealing_epochs=0, select="test")
    assert selections == [True, False, False]


def test_a_larger_training_radius_is_not_evaluated(monkeypatch):
    given = {"annealing_epochs": 4, "annealing": "linear", "eps": 0.1, "train_eps": 0.4}
    _, selections, radii = select(monkeypatch, robust(0.9, 0.5, 0.4, 0.6, 0.6, 0.5), **given)
    # Last iterations of the epochs have radii 3/16, 7/16, ... of 0.4: beyond 0.1 from epoch 1 on.
    assert radii == pytest.approx([0.075, 0.1, 0.1, 0.1, 0.1, 0.1], rel=1e-12)
    assert selections == [True, True, False, True, False, False]


def test_a_smaller_training_radius_still_selects_the_best(monkeypatch):
    given = {"annealing_epochs": 1, "eps": 0.1, "train_eps": 0.05}
    trainer, selections, _ = select(monkeypatch, robust(0.9, 0.5, 0.7, 0.6), **given)
    assert selections == [True, True, True, False]
    assert trainer.selected_epoch == 2


def test_without_validation_the_last_is_kept():
    trainer = tiny_trainer(epochs=2, select="last", validation=0)
    records, selections = train(trainer, tiny())
    assert selections == [True, True]
    assert not any("validation" in key for record in records for key in record)
