"""Goals of attacks: what is maximised, and what counts as broken."""

from __future__ import annotations

import math

import pytest
import torch

from tightrope.attacks import CrossEntropy, Margin, Targeted, misclassified, worst_margin

LOGITS = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, -1.0], [1.0, 1.0, 4.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1])


def test_the_worst_margin_is_the_true_class_over_the_best_wrong_one() -> None:
    assert worst_margin(LOGITS, LABELS).tolist() == [1.0, -6.0, -3.0]
    assert Margin(LABELS)(LOGITS).tolist() == [-1.0, 6.0, 3.0]


def test_cross_entropy_by_hand() -> None:
    expected = [
        math.log(sum(math.exp(o - row[label]) for o in row))
        for row, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True)
    ]
    assert CrossEntropy(LABELS)(LOGITS).tolist() == pytest.approx(expected, rel=1e-12)


def test_targeted_is_one_difference() -> None:
    goal = Targeted(LABELS, torch.tensor([1, 0, 2]))
    assert goal(LOGITS).tolist() == [-2.0, 1.0, 3.0]
    assert goal.reached(LOGITS).tolist() == [False, True, True]


def test_targeted_reaches_its_own_class_only() -> None:
    # Misclassified, but as class 1: the target 0 loses to the label 2.
    logits = torch.tensor([[-1.0, 5.0, 0.0]])
    goal = Targeted(torch.tensor([2]), torch.tensor([0]))
    assert misclassified(logits, torch.tensor([2])).item()
    assert not goal.reached(logits).item()


@pytest.mark.parametrize("goal", [CrossEntropy, Margin])
def test_reached_means_misclassified(goal: type) -> None:
    assert goal(LABELS).reached(LOGITS).tolist() == [False, True, True]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("row", "label", "expected"),
    [
        ([2.0, 1.0], 0, False),
        ([1.0, 2.0], 0, True),
        ([1.0, 1.0], 0, True),  # a tie
        ([0.0, -0.0], 0, True),
        ([1.0, 1.0], 1, True),
        ([NAN, 0.0], 0, True),
        ([0.0, NAN], 0, True),
        ([5.0, 0.0, NAN], 0, True),
        ([NAN, NAN], 1, True),
        ([INF, 0.0], 0, False),
        ([INF, INF], 0, True),  # undefined
        ([-INF, -INF], 0, True),
        ([0.0, -INF], 0, False),
    ],
)
def test_ties_and_undefined_outputs_are_misclassified(
    row: list[float], label: int, expected: bool
) -> None:
    logits, labels = torch.tensor([row]), torch.tensor([label])
    assert misclassified(logits, labels).item() is expected
    assert CrossEntropy(labels).reached(logits).item() is expected
    assert Margin(labels).reached(logits).item() is expected


def test_selection_narrows_all_that_a_goal_holds() -> None:
    index = torch.tensor([2, 0])
    targets = torch.tensor([1, 0, 2])
    for goal in (CrossEntropy(LABELS), Margin(LABELS), Targeted(LABELS, targets)):
        narrowed = goal.select(index)
        torch.testing.assert_close(narrowed(LOGITS[index]), goal(LOGITS)[index])
        assert torch.equal(narrowed.reached(LOGITS[index]), goal.reached(LOGITS)[index])


def test_gradients_of_goals() -> None:
    logits = LOGITS.clone().requires_grad_()
    (margin,) = torch.autograd.grad(Margin(LABELS)(logits).sum(), logits)
    assert margin.tolist() == [[-1.0, 0.0, 1.0], [0.0, 1.0, -1.0], [0.0, -1.0, 1.0]]
    (entropy,) = torch.autograd.grad(CrossEntropy(LABELS)(logits).sum(), logits)
    one_hot = torch.nn.functional.one_hot(LABELS, 3)
    torch.testing.assert_close(entropy, LOGITS.softmax(1) - one_hot)
    targeted = Targeted(LABELS, torch.tensor([1, 0, 2]))
    (pair,) = torch.autograd.grad(targeted(logits).sum(), logits)
    assert pair.tolist() == [[-1.0, 1.0, 0.0], [1.0, 0.0, -1.0], [0.0, -1.0, 1.0]]
