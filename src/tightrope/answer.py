"""The answer to a question about a network: what certification says, and all it says.

Only `tightrope.certification` makes answers; the journal, the page and users read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


# The competition's words for answers, and ours for what ended in an error.
WORDS = ("unsat", "sat", "unknown", "timeout", "error")


class Verdict(StrEnum):
    """What certification can say of a sample; there is nothing else."""

    VERIFIED = "verified"
    FALSIFIED = "falsified"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """What kept certification from a verdict."""

    TIME = "time"
    MEMORY = "memory"
    NO_ENCODING = "no encoding"
    TOLERANCE = "within the solver's tolerances"
    ROUNDING = "rounding"
    TOO_CLOSE = "subproblems too close to zero to decide"
    INPUT = "no float lies in the box"
    OUTPUT = "outputs that are not finite"


@dataclass(frozen=True)
class Answer:
    """The answer to one problem.

    `counterexample` is an input in the exact set at which the original network fails; `bound` a
    proved lower bound on the worst margin (None: no proof came about); `stage` is what decided, or
    the last one tried; `cause` and `reason` say why nothing did; `subproblems` counts the parts
    that a search looked at; `outputs` are those of an ONNX file at the counterexample; `note` says
    how the question was read, where that is not plain.
    """

    verdict: Verdict = Verdict.UNKNOWN
    stage: str = ""
    seconds: float = 0.0
    bound: float | None = None
    counterexample: Tensor | None = None
    subproblems: int = 0
    cause: Cause | None = None
    details: str = ""
    outputs: Tensor | None = None
    note: str = ""

    def __bool__(self) -> bool:
        return self.verdict is Verdict.VERIFIED

    @property
    def reason(self) -> str:
        """Why there is no verdict, in words."""
        if self.cause is None:
            return ""
        return f"{self.cause}: {self.details}" if self.details else str(self.cause)

    @property
    def domains(self) -> int:
        """The number of subproblems, by the name that files give it."""
        return self.subproblems


Verification = Answer  # its name in earlier versions


def verified(bound: float, subproblems: int = 0) -> Answer:
    """Return the answer of a proof."""
    return Answer(Verdict.VERIFIED, bound=bound, subproblems=subproblems)


def falsified(point: Tensor, subproblems: int = 0) -> Answer:
    """Return the answer of a counterexample."""
    return Answer(Verdict.FALSIFIED, counterexample=point, subproblems=subproblems)


def undecided(
    cause: Cause | None = None,
    details: str = "",
    *,
    bound: float | None = None,
    subproblems: int = 0,
) -> Answer:
    """Return the answer of who found neither a proof nor a counterexample."""
    return Answer(bound=bound, subproblems=subproblems, cause=cause, details=details)


def competition_word(found: Answer) -> str:
    """Return the answer in the competition's words."""
    if found.verdict is Verdict.UNKNOWN:
        return "timeout" if found.cause is Cause.TIME else "unknown"
    return "unsat" if found.verdict is Verdict.VERIFIED else "sat"
