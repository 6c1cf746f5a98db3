"""Bounds of subproblems: boxes of a reduced network cut by the signs of some neurons.

A subproblem fixes some unstable ReLUs to be active (+1) or inactive (-1). Its bound has three
kinds of free parameters: `alpha`, the lower slope of a neuron that is not split; `beta >= 0`, the
multiplier of a split's constraint `sign h >= 0`; `gamma >= 0`, multipliers of multi-neuron
constraints. All subproblems of a batch are bounded at once, and the gradient is in closed form
as in `tightrope.domains.linear.alpha`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightrope.box import BallBox
from tightrope.deadline import check_time
from tightrope.domains.balls import fall, lowest_point
from tightrope.domains.linear.ascent import Ascent, Parameter
from tightrope.domains.reduced.factors import Factor
from tightrope.domains.reduced.reduction import Reduced


@dataclass(frozen=True)
class Subproblems:
    """A batch of subproblems with their parameters, D of them.

    `row` says which row of the property each one is about, `sign` which neurons are split, and
    `region` which bounds of the neurons hold (`regions.py`).
    """

    row: Tensor  # [D]
    sign: Tensor  # [D, U] int8
    alpha: Tensor  # [D, U]
    beta: Tensor  # [D, U]
    gamma: Tensor  # [D, G]
    region: Tensor  # [D]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Tensor | slice) -> Subproblems:
        return Subproblems(**{k: v[index] for k, v in vars(self).items()})


def join(parts: list[Subproblems]) -> Subproblems:
    """Put batches together."""
    fields = vars(parts[0]).keys()
    return Subproblems(**{k: torch.cat([getattr(p, k) for p in parts]) for k in fields})


@dataclass(frozen=True)
class Cuts:
    """Multi-neuron constraints over all unstable neurons: `on_outputs y + on_inputs h + c <= 0`."""

    on_outputs: Tensor  # [G, U]
    on_inputs: Tensor  # [G, U]
    constant: Tensor  # [G]

    def __getitem__(self, index: Tensor) -> Cuts:
        return Cuts(*(t[index] for t in vars(self).values()))

    def to(self, dtype: torch.dtype) -> Cuts:
        """Return the same in another precision."""
        return Cuts(*(t.to(dtype) for t in vars(self).values()))


@dataclass(frozen=True)
class View:
    """What one backward pass found: bounds, coefficients of the outputs y and of the input."""

    bound: Tensor
    coefficients: Tensor
    slope: Tensor
    rise: Tensor
    input: Tensor


class Bounder:
    """Bounds subproblems of one reduced network."""

    def __init__(self, network: Reduced, cuts: Cuts | None = None) -> None:
        self.network = network
        self.cuts = cuts
        self.center, self.radius = (t[0] for t in network.box.middle)
        self.ball = network.box if isinstance(network.box, BallBox) else None
        # Contiguous blocks: products with slices of a large matrix would copy them each time.
        spans = [layer.span for layer in network.layers]
        self.spans = spans
        inner, outer = network.neurons.inner, network.neurons.outer
        self.behind = [Factor(inner[s.stop :, s].contiguous()) for s in spans]
        self.before = [Factor(inner[s, : s.start].t().contiguous()) for s in spans]
        self.outer, self.outer_t = Factor(outer), Factor(outer.t().contiguous())
        self.constant = network.neurons.constant
        # A neuron that is zero but for rounding errors is not worth a split.
        self.bends = network.reach > 1e-12 * (network.reach.max() if network.size else 1.0)
        # The upper lines of each region, [regions, U].
        self.chords = network.lines.upper_slope[None]
        self.peaks = network.lines.upper_intercept[None]
        biases = [layer.bias.to(outer) for layer in network.layers]
        self.bias = torch.cat(biases) if biases else self.constant

    def with_cuts(self, cuts: Cuts) -> Bounder:
        """Return a bounder of the same regions that knows multi-neuron constraints."""
        other = Bounder(self.network, cuts)
        other.chords, other.peaks = self.chords, self.peaks
        return other

    def root(self, rows: Tensor) -> Subproblems:
        """Return the subproblems without splits, one per row."""
        network = self.network
        slope = (network.upper > -network.lower).to(network.upper)
        count = len(rows)
        cuts = 0 if self.cuts is None else len(self.cuts.constant)
        return Subproblems(
            row=rows,
            sign=torch.zeros(count, network.size, dtype=torch.int8, device=rows.device),
            alpha=slope.expand(count, -1).clone(),
            beta=slope.new_zeros(count, network.size),
            gamma=slope.new_zeros(count, cuts),
            region=torch.zeros(count, dtype=torch.long, device=rows.device),
        )

    def upper_lines(self, problems: Subproblems) -> tuple[Tensor, Tensor]:
        """Return slopes and intercepts of the upper lines, [D, U] or [1, U]."""
        if len(self.chords) == 1:
            return self.chords, self.peaks
        return self.chords[problems.region], self.peaks[problems.region]

    def begin(self, problems: Subproblems) -> tuple[Tensor, Tensor, Tensor]:
        """Return the coefficients of outputs and inputs to begin with, and the constants."""
        rows = self.network.rows
        return rows.inner[problems.row], rows.outer[problems.row], rows.constant[problems.row]

    def look(self, problems: Subproblems) -> View:
        """Bound subproblems with the parameters they have."""
        sign = problems.sign
        chord, peak = self.upper_lines(problems)
        free = sign == 0
        fixed = (sign > 0).to(chord)
        upper = torch.where(free, chord, fixed)
        peak = torch.where(free, peak, 0.0)
        lower = torch.where(free, problems.alpha, fixed)
        after = -problems.beta * sign
        a, x, constant = self.begin(problems)
        if self.cuts is not None:
            a = a + problems.gamma @ self.cuts.on_outputs
            after = after + problems.gamma @ self.cuts.on_inputs
            constant = constant + problems.gamma @ self.cuts.constant
        h = torch.empty_like(a)
        slope = torch.empty_like(a)
        for k in reversed(range(len(self.spans))):
            span = self.spans[k]
            if k + 1 < len(self.spans):
                self.behind[k].added(h[:, span.stop :], a[:, span])
            part = a[:, span]
            slope[:, span] = torch.where(part >= 0, lower[:, span], upper[:, span])
            torch.addcmul(after[:, span], part, slope[:, span], out=h[:, span])
        rise = torch.where(a < 0, peak, 0.0)
        x = self.outer.added(h, x)
        bound = constant + h @ self.constant + (a * rise).sum(1)
        whole = bound + x @ self.center - x.abs() @ self.radius
        if self.ball is not None:
            whole = torch.fmax(whole, bound + self._ball_minimum(x))
        return View(whole, a, slope, rise, x)

    def _ball_minimum(self, x: Tensor) -> Tensor:
        assert self.ball is not None
        return x @ self.ball.point[0] - fall(self.ball, x, self.ball.point, *self.ball.corners)

    def minimizer(self, view: View) -> Tensor:
        """Return where in the box each bound is attained."""
        x = view.input
        corner = self.center - x.sign() * self.radius
        if self.ball is None:
            return corner
        inside = lowest_point(self.ball, x, self.ball.point, *self.ball.corners)
        by_ball = self._ball_minimum(x) > x @ self.center - x.abs() @ self.radius
        return torch.where(by_ball[:, None], inside, corner)

    def push(self, view: View) -> tuple[Tensor, Tensor]:
        """Push the minimisers forward: what each neuron sees, and the lines' values there."""
        x = self.minimizer(view)
        h = self.outer_t.added(x, self.constant.repeat(len(x), 1))
        y = torch.empty_like(h)
        for k, span in enumerate(self.spans):
            if k:
                self.before[k].added(y[:, : span.start], h[:, span])
            torch.addcmul(view.rise[:, span], h[:, span], view.slope[:, span], out=y[:, span])
        return h, y

    def improve(
        self,
        problems: Subproblems,
        *,
        iterations: int,
        alpha_rate: float = 0.1,
        beta_rate: float = 0.1,
        gamma_rate: float = 0.02,
        threshold: float = 0.0,
        decay: float = 0.95,
    ) -> tuple[Tensor, Subproblems]:
        """Improve the bounds by gradient ascent; return the best ones with their parameters.

        Subproblems whose bound exceeds `threshold` leave the batch once they are a fifth of it.
        """
        bound = problems.alpha.new_full((len(problems),), -torch.inf)
        kept = Subproblems(**{k: v.clone() for k, v in vars(problems).items()})
        alive = torch.arange(len(problems), device=bound.device)
        current = Subproblems(**{k: v.clone() for k, v in vars(problems).items()})
        ascent = _ascent(current, alpha_rate, beta_rate, gamma_rate, decay)
        for iteration in range(iterations + 1):
            check_time()
            view = self.look(current)
            ascent.record(view.bound)
            proved = ascent.bound > threshold
            last = iteration == iterations or bool(proved.all())
            if last or 5 * int(proved.sum()) >= len(proved):
                _store(kept, bound, alive, ascent)
                if last:
                    break
                going = (~proved).nonzero()[:, 0]
                alive, current = alive[going], current[going]
                ascent.select(going)
                view = View(*(t[going] for t in vars(view).values()))
                current = _with(current, ascent)
            self._step(current, view, ascent)
        return bound, kept

    def _step(self, current: Subproblems, view: View, ascent: Ascent[str]) -> None:
        h, y = self.push(view)
        gradients = {"alpha": view.coefficients.clamp(min=0).mul_(h)}
        if "beta" in ascent.parameters:
            gradients["beta"] = (current.sign * h).neg_()
        if self.cuts is not None:
            gradients["gamma"] = (
                y @ self.cuts.on_outputs.t() + h @ self.cuts.on_inputs.t() + self.cuts.constant
            )
        ascent.step(gradients)


def _ascent(
    current: Subproblems, alpha: float, beta: float, gamma: float, decay: float
) -> Ascent[str]:
    parameters = {"alpha": Parameter(current.alpha, alpha, 0.0, 1.0)}
    if current.sign.any():
        parameters["beta"] = Parameter(current.beta, beta, 0.0, None)
    if current.gamma.shape[1]:
        parameters["gamma"] = Parameter(current.gamma, gamma, 0.0, None)
    return Ascent(parameters, decay=decay)


def _with(current: Subproblems, ascent: Ascent[str]) -> Subproblems:
    """Return the subproblems with the tensors that the ascent moves."""
    return replace(current, **{name: p.values for name, p in ascent.parameters.items()})


def _store(kept: Subproblems, bound: Tensor, alive: Tensor, ascent: Ascent[str]) -> None:
    bound[alive] = ascent.bound
    for name, best in ascent.best.items():
        getattr(kept, name)[alive] = best
