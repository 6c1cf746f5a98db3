"""What a report is made of: plain data, read from run folders by somebody else.

A part that a run does not have is None or empty; `notices` say what is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VERDICTS = ("verified", "falsified", "unknown")


@dataclass(frozen=True)
class Epoch:
    """One line of `history.jsonl`; what the line lacks is missing here, too."""

    number: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """One certified sample; `margin` is finite or None."""

    index: int
    label: int
    prediction: int
    verdict: str
    stage: str
    margin: float | None
    counterexample: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Stage:
    """What one stage of the certification decided, and its seconds over all samples."""

    name: str
    verified: int
    falsified: int
    seconds: float


@dataclass(frozen=True)
class Radius:
    """The accuracies at one of several radii; `samples` are those decided, `value` is a float."""

    eps: str
    value: float
    samples: int
    natural: float
    adversarial: float | None
    certified: float
    unknown: int


@dataclass(frozen=True)
class Certificate:
    """The summary of a certification; `open` samples have no verdict yet."""

    samples: int
    verified: int
    falsified: int
    unknown: int
    open: int
    natural: float
    adversarial: float | None
    certified: float
    seconds: float
    eps: str | None
    norm: str | None = None  # of the radii, unless it is linf
    stages: tuple[Stage, ...] = ()
    radii: tuple[Radius, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Votes:
    """What votes under noise say (`smooth`): `certified` are shares at l2 radii, as text.

    Each radius is too large with probability at most `alpha`. Not a certificate of the network.
    """

    samples: int
    accuracy: float
    abstained: float
    sigma: float
    draws: int
    alpha: float
    certified: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Exhibit:
    """A sample in the gallery: pictures are data URIs, predictions are names of classes.

    `size` is the largest change of a pixel, `alias` the class that the counterexample gets.
    """

    sample: Sample
    label: str
    prediction: str
    original: str | None = None
    perturbation: str | None = None
    adversarial: str | None = None
    alias: str | None = None
    size: float | None = None


@dataclass(frozen=True)
class Gallery:
    """Samples to look at; `problem` says why pictures are missing."""

    falsified: tuple[Exhibit, ...] = ()
    hardest: tuple[Exhibit, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Contents:
    """Everything a report shows of one run; `settings` and `commands` are text."""

    name: str
    folder: str
    settings: Mapping[str, str] = field(default_factory=dict)
    history: tuple[Epoch, ...] = ()
    annealing: tuple[int, int] | None = None
    certificate: Certificate | None = None
    votes: Votes | None = None
    samples: tuple[Sample, ...] = ()
    gallery: Gallery = field(default_factory=Gallery)
    commands: tuple[str, ...] = ()
    further: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def method(self) -> str | None:
        """The training method."""
        return self.settings.get("method")

    @property
    def eps(self) -> str | None:
        """The radius that was certified, or else the one to be robust to."""
        certified = None if self.certificate is None else self.certificate.eps
        return certified or self.settings.get("eps")

    @property
    def radius(self) -> str | None:
        """The radius as it is shown, with its norm unless that is linf."""
        norm = None if self.certificate is None else self.certificate.norm
        return f"{self.eps} ({norm})" if self.eps and norm else self.eps

    @property
    def training_seconds(self) -> float | None:
        """How long the epochs so far took."""
        seconds = [e.values["seconds"] for e in self.history if "seconds" in e.values]
        return sum(seconds) if seconds else None


@dataclass(frozen=True)
class Skipped:
    """A path of which nothing can be shown."""

    folder: str
    reason: str
