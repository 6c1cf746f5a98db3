"""Which neuron to split: scores from the coefficients of the present bound.

`a` is the coefficient that arrives at a neuron's output, l and u its bounds, `s = u/(u - l)` the
slope and `-l s` the intercept of its upper line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tightrope.domains.reduced.splits import Bounder, Subproblems, View, join

# Gets the subproblems, how they are bounded at present, how many neurons to split and how many
# candidates to try; returns the neurons to split, [D, levels].
Rule = Callable[[Bounder, Subproblems, View, int, int], Tensor]


def triangles(bounder: Bounder, problems: Subproblems, view: View) -> Tensor:
    """Return what the upper lines' intercepts cost the bounds, [D, U], zero at split neurons."""
    cost = (-view.coefficients).clamp(min=0) * bounder.upper_lines(problems)[1]
    return torch.where(problems.sign == 0, cost, 0.0)


def intercept_scores(bounder: Bounder, problems: Subproblems, view: View) -> Tensor:
    """What the upper lines' intercepts cost the bound: `max(-a, 0) u (-l) / (u - l)`."""
    return _open_only(bounder, problems, triangles(bounder, problems, view))


def _open_only(bounder: Bounder, problems: Subproblems, score: Tensor) -> Tensor:
    return torch.where((problems.sign == 0) & bounder.bends, score, -torch.inf)


def babsr_scores(bounder: Bounder, problems: Subproblems, view: View) -> Tensor:
    """BaBSR: the intercept's cost and what the bias of the layer before gains by a split."""
    a = view.coefficients
    bias = bounder.bias * a
    chord, peak = bounder.upper_lines(problems)
    gain = torch.maximum(bias * (chord - 1), bias * chord)
    score = (gain + a.clamp(max=0) * peak).abs()
    return _open_only(bounder, problems, score)


def children(problems: Subproblems, neurons: Tensor) -> Subproblems:
    """Split each subproblem at some neurons, [D, m]: 2^m children, grouped by their signs."""
    parts = [problems]
    for level in range(neurons.shape[1]):
        column = neurons[:, level : level + 1]
        parts = [_fixed(part, column, sign) for part in parts for sign in (1, -1)]
    return join(parts)


def _fixed(problems: Subproblems, neurons: Tensor, sign: int) -> Subproblems:
    signs = problems.sign.scatter(1, neurons, sign)
    return replace(problems, sign=signs)


def choose(
    bounder: Bounder, problems: Subproblems, *, rule: str, levels: int = 1, candidates: int = 3
) -> Tensor:
    """Return the neurons to split by one of the `RULES`, [D, levels].

    Multipliers of multi-neuron constraints are left out: they take the cost of a neuron's own
    lines off its score, and the search would split it last.
    """
    problems = replace(problems, gamma=torch.zeros_like(problems.gamma))
    return RULES[rule](bounder, problems, bounder.look(problems), levels, candidates)


def _by(scores: Callable[[Bounder, Subproblems, View], Tensor]) -> Rule:
    return lambda bounder, problems, view, levels, candidates: _top(
        scores(bounder, problems, view), levels
    )


def _by_looking_ahead(
    bounder: Bounder, problems: Subproblems, view: View, levels: int, candidates: int
) -> Tensor:
    """Look one split ahead at the best candidates of both scores."""
    intercept = intercept_scores(bounder, problems, view)
    babsr = babsr_scores(bounder, problems, view)
    tried = torch.cat((_top(intercept, candidates), _top(babsr, candidates)), 1)
    # A neuron that is not split yet goes first even if its bounds overflowed.
    gains = _look_ahead(bounder, problems, tried).clamp(min=torch.finfo(problems.alpha.dtype).min)
    splittable = ((problems.sign == 0) & bounder.bends).gather(1, tried)
    gains = torch.where(splittable, gains, -torch.inf)
    best = gains.topk(min(levels, gains.shape[1]), 1).indices
    chosen = tried.gather(1, best)
    return _without_repeats(chosen, problems, intercept)


def _top(scores: Tensor, count: int) -> Tensor:
    return scores.topk(min(count, scores.shape[1]), 1).indices


def _look_ahead(bounder: Bounder, problems: Subproblems, tried: Tensor) -> Tensor:
    """Bound both children of each candidate in one pass; return the lower of the two bounds."""
    count = tried.shape[1]
    repeated = problems[torch.arange(len(problems)).repeat_interleave(count)]
    both = children(repeated, tried.reshape(-1, 1))
    bounds = bounder.look(both).bound.view(2, len(problems), count)
    return bounds.amin(0) + 1e-3 * bounds.amax(0)


def _without_repeats(chosen: Tensor, problems: Subproblems, backup: Tensor) -> Tensor:
    """Replace neurons that were chosen twice, once by each score, by the next best one."""
    if chosen.shape[1] == 1:
        return chosen
    taken = backup.scatter(1, chosen, -torch.inf)
    for level in range(1, chosen.shape[1]):
        again = (chosen[:, :level] == chosen[:, level : level + 1]).any(1)
        other = taken.argmax(1)
        chosen[:, level] = torch.where(again, other, chosen[:, level])
        taken = taken.scatter(1, chosen[:, level : level + 1], -torch.inf)
    return chosen


RULES: dict[str, Rule] = {
    "intercept": _by(intercept_scores),
    "babsr": _by(babsr_scores),
    "kfsb": _by_looking_ahead,
}
