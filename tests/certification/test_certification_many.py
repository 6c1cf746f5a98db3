"""Twenty thousand small problems of layers, and eight thousand of what is composed, in every mode.

Against exact values.

`make test` decides some hundreds of them, `make test-slow` all.
"""

from __future__ import annotations

from collections import Counter

import pytest
from composed_instances import COMPOSED
from effort import mostly_slow
from many_instances import EVERY_KIND, draw
from many_modes import MODES, together

pytestmark = pytest.mark.usefixtures("one_thread")

NETWORKS, PROBLEMS, EACH = 5, 20, 4  # of a part, of a network, decided in one mode
FEWER = 8  # problems of a network of composed layers
PARTS = 200
QUICK = 8


@pytest.mark.parametrize("part", mostly_slow(range(PARTS), QUICK))
def test_answers_agree_with_exact_values(part: int) -> None:
    assert_agreement(part, EVERY_KIND, PROBLEMS, least=5)


@pytest.mark.parametrize("part", mostly_slow(range(PARTS), 1))
def test_answers_about_composed_layers_agree_with_exact_values(part: int) -> None:
    """Smooth functions, products, attention, normalisations, jumps, copies, recurrent layers."""
    assert_agreement(part, tuple(COMPOSED), FEWER, least=1)  # much stays open


def assert_agreement(part: int, kinds: tuple[str, ...], number: int, *, least: int) -> None:
    """Decide the problems of a part and compare the answers with exact values."""
    counts: Counter[str] = Counter()
    names = list(MODES)
    for seed in range(NETWORKS * part, NETWORKS * (part + 1)):
        drawn = draw(seed, kinds)
        problems = list(drawn.problems(number, seed))
        for k in range(number // EACH):
            some = problems[EACH * k : EACH * (k + 1)]
            # The modes take turns; as there are other numbers of kinds, each kind meets them all.
            name = names[(seed // len(kinds) + seed * (number // EACH) + k) % len(names)]
            answers = MODES[name](drawn.subject, [problem for problem, _ in some])
            for (problem, _), answer in zip(some, answers, strict=True):
                counts[drawn.check(problem, answer)] += 1
    assert sum(counts.values()) == NETWORKS * number
    assert counts["verified"] >= least and counts["falsified"] >= least, counts


@pytest.mark.parametrize("part", mostly_slow(range(PARTS), QUICK))
def test_answers_about_many_problems_together_agree_with_exact_values(part: int) -> None:
    decided = 0
    for seed in range(NETWORKS * part, NETWORKS * (part + 1)):
        drawn = draw(seed)
        problems = list(drawn.problems(PROBLEMS, seed))
        positive = [p for p in problems if p[1] > 0]
        for some in (positive, problems):
            alone = [problem for problem, _ in some]
            found = together(drawn.subject, alone)
            if found is None:
                continue
            answer, number = found
            if answer.counterexample is not None:
                drawn.check(alone[number], answer)
                decided += 1
            else:
                for problem in alone:
                    drawn.check(problem, answer)
                decided += bool(answer)
    assert decided >= 2
