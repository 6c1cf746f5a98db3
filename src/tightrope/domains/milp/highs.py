"""HiGHS on an encoding: linear relaxations with a proof, and branch and bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tightrope.domains.milp.encoding import SMALLEST_COEFFICIENT, Encoding
from tightrope.domains.milp.expressions import EPS, TINY, Array, require
from tightrope.domains.rounding import growth

# HiGHS refuses feasibility tolerances below 1e-10; some room is left to work in.
TOLERANCE = 1e-9
# The search ends when the bound is that close to the incumbent.
GAP = 1e-7
# How a search may end so that it comes with a bound. "Infeasible" is not among them: a network
# always has a point, so that it would be a failure and no proof.
ENDINGS = ("kOptimal", "kTimeLimit", "kInterrupt", "kObjectiveTarget")

Solution = tuple[float, Array | None, bool]  # lower bound, variables, whether that is optimal


@dataclass(frozen=True, eq=False)
class Objective:
    """`cost . variables + constant`, off by at most `error`."""

    cost: Array
    constant: float
    error: float

    @classmethod
    def of(cls, encoding: Encoding, row: Array, offset: float) -> Objective:
        """Return `row . output + offset`."""
        output = encoding.output
        size = np.abs(row) @ output.magnitude + abs(offset)
        error = np.abs(row) @ output.error + growth(len(row) + 8, EPS) * size
        constant = float(row @ output.constant + offset)
        return cls(output.matrix.T @ row, constant, float(error))

    def interval_bound(self, encoding: Encoding) -> float:
        """Return a lower bound from the bounds of the variables alone."""
        ends = np.minimum(self.cost * encoding.lower, self.cost * encoding.upper)
        return self.rounded(float(ends.sum()), float(np.abs(self.cost) @ encoding.largest))

    def rounded(self, value: float, size: float) -> float:
        """Return value + constant, less the rounding of a sum of that size."""
        size = size + abs(self.constant)
        slack = self.error + growth(len(self.cost) + 8, EPS) * size + TINY
        lower = value + self.constant - slack
        return lower if math.isfinite(lower) else -math.inf


class Solver:
    """An encoding in the form that HiGHS takes, for one objective after the other."""

    def __init__(self, encoding: Encoding, threads: int) -> None:
        self.encoding = encoding
        self.rows = encoding.rows()
        self.threads = threads
        self.highspy: Any = require("highspy")
        self._relaxed: Any = None

    def relax(
        self, objective: Objective, seconds: float | None, above: float, below: float
    ) -> Solution:
        """Solve the linear relaxation; the lower bound is proved from the dual values.

        There is no early stop: a linear program ends soon. The solver is kept, as one
        objective's optimum is a good start for the next.
        """
        solver = self._relaxed = self._relaxed or self._new(relaxed=True)
        if solver is None:
            return -math.inf, None, False
        if seconds is not None:  # the simplex method counts from the first run
            solver.setOptionValue("time_limit", solver.getRunTime() + seconds)
        solution, status = self._run(solver, objective)
        values = np.array(solution.col_value) if solution.value_valid else None
        duals = np.array(solution.row_dual) if solution.dual_valid else None
        return self._dual_bound(objective, duals), values, status == "kOptimal"

    def search(
        self, objective: Objective, seconds: float | None, above: float, below: float
    ) -> Solution:
        """Branch and bound until a bound `above` or a point `below` is found."""
        solver = self._new(relaxed=False)  # an old one would remember that it was interrupted
        if solver is None:
            return -math.inf, None, False
        if seconds is not None:  # branch and bound counts from the start of this run
            solver.setOptionValue("time_limit", seconds)
        if below > -math.inf:
            solver.setOptionValue("objective_target", below)
        if above < math.inf:
            limit = above + objective.error

            def interrupt(event: Any) -> None:
                if event.data_out.mip_dual_bound > limit:
                    event.interrupt()

            solver.cbMipInterrupt.subscribe(interrupt)
        solution, status = self._run(solver, objective)
        values = np.array(solution.col_value) if solution.value_valid else None
        lower = solver.getInfo().mip_dual_bound - objective.error
        proved = status in ENDINGS and math.isfinite(lower)
        return (lower if proved else -math.inf), values, status == "kOptimal"

    def _run(self, solver: Any, objective: Objective) -> tuple[Any, str]:
        """Return the solution and the name of the status."""
        columns = np.arange(self.encoding.size, dtype=np.int32)
        solver.changeColsCost(len(columns), columns, objective.cost)
        solver.changeObjectiveOffset(objective.constant)
        if solver.run() == self.highspy.HighsStatus.kError:
            # The threads of the process may belong to a run with another number of them.
            self.highspy.Highs.resetGlobalScheduler(True)
            solver.run()
        return solver.getSolution(), solver.getModelStatus().name

    def _dual_bound(self, objective: Objective, duals: Array | None) -> float:
        """Return the lower bound that dual values prove, whatever values they are."""
        if duals is None:
            return -math.inf
        rows, encoding = self.rows, self.encoding
        duals = np.nan_to_num(duals, nan=0.0, posinf=0.0, neginf=0.0)
        duals = np.where(duals > 0, np.where(np.isfinite(rows.lower), duals, 0.0), duals)
        duals = np.where(duals < 0, np.where(np.isfinite(rows.upper), duals, 0.0), duals)
        side = np.where(duals > 0, rows.lower, np.where(duals < 0, rows.upper, 0.0))
        reduced = objective.cost - rows.matrix.T @ duals
        ends = np.minimum(reduced * encoding.lower, reduced * encoding.upper)
        value = duals @ side - np.abs(duals) @ rows.slack + ends.sum()
        size = np.abs(duals) @ (np.abs(side) + rows.slack + abs(rows.matrix) @ encoding.largest)
        size += np.abs(objective.cost) @ encoding.largest
        # Sums run over rows and over variables, one inside the other.
        factor = growth(len(duals) + len(reduced) + 8, EPS)
        return objective.rounded(float(value - factor * size), float(size))

    def _new(self, *, relaxed: bool) -> Any:
        """Return HiGHS with the model, or None if it refuses the model."""
        highspy, encoding, rows = self.highspy, self.encoding, self.rows
        solver = highspy.Highs()
        options: dict[str, Any] = {
            "output_flag": False,
            "threads": self.threads,
            "primal_feasibility_tolerance": TOLERANCE,
            "dual_feasibility_tolerance": TOLERANCE,
            "mip_feasibility_tolerance": TOLERANCE,
            "mip_abs_gap": GAP,
            "mip_rel_gap": 0.0,
            "small_matrix_value": SMALLEST_COEFFICIENT,
        }
        if not relaxed:
            # With presolve, HiGHS 1.15 called an optimum proved that a point of the box beats.
            options["presolve"] = "off"
        for name, value in options.items():
            solver.setOptionValue(name, value)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = encoding.size, len(rows.lower)
        model.col_cost_ = np.zeros(encoding.size)
        model.col_lower_, model.col_upper_ = encoding.lower, encoding.upper
        model.row_lower_, model.row_upper_ = rows.lower, rows.upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.num_col_, model.a_matrix_.num_row_ = encoding.size, len(rows.lower)
        model.a_matrix_.start_ = rows.matrix.indptr.astype(np.int32)
        model.a_matrix_.index_ = rows.matrix.indices.astype(np.int32)
        model.a_matrix_.value_ = rows.matrix.data
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[int(integer)] for integer in encoding.integer]
        if solver.passModel(model) == highspy.HighsStatus.kError:
            return None
        return solver
