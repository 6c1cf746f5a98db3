"""The summary of a certification: counts that add up, and the three accuracies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tightrope.answer import Verdict
from tightrope.runs.found import Found, mapping, read_result
from tightrope.runs.journal import Record

WHAT = "the summary of the certification"
_COUNTS = ("samples", "verified", "falsified", "unknown", "open")
_POINT = (*_COUNTS, "natural", "adversarial", "certified")
LARGEST = 1e30  # larger numbers are damage
# The stages that look for counterexamples.
REFUTING = frozenset({"quick", "attack", "bab", "milp"})


@dataclass(frozen=True)
class Certification:
    """What is known of the samples asked for; `open` ones have no verdict yet.

    `natural`, `adversarial` and `certified` are accuracies over all decided samples: classified
    correctly; correctly and not refuted; proved. `adversarial` is None when no stage ran that
    refutes. `reasons` counts why samples stayed unknown, as far as a stage said so. `curve` has the
    counts and accuracies of each radius, where there are several, from the smallest on.
    """

    samples: int
    verified: int
    falsified: int
    unknown: int
    open: int
    natural: float
    adversarial: float | None
    certified: float
    stages: dict[str, dict[str, Any]]
    seconds: float
    complete: bool
    reasons: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `certification.json`."""
        return asdict(self)

    def point(self) -> dict[str, Any]:
        """Return what a curve says of this radius."""
        return {"eps": self.settings["eps"], **{name: getattr(self, name) for name in _POINT}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Certification:
        """Read what `to_json` wrote; `ValueError` if numbers are missing or make no sense."""
        try:
            adversarial = values["adversarial"]
            if not values["samples"]:
                raise ValueError("no samples")
            return cls(
                **{name: _whole(values[name]) for name in _COUNTS},
                natural=_share(values["natural"]),
                adversarial=None if adversarial is None else _share(adversarial),
                certified=_share(values["certified"]),
                stages={str(k): _stage(s) for k, s in mapping(values["stages"]).items()},
                seconds=_amount(values["seconds"]),
                complete=bool(values["complete"]),
                reasons={str(k): _whole(n) for k, n in mapping(values.get("reasons", {})).items()},
                settings=mapping(values["settings"]),
                curve=[_point(mapping(point)) for point in _listed(values.get("curve", []))],
            )
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None


def read_summary(path: Path) -> Found[dict[str, Any]]:
    """Read `certification.json`; its `settings` are a table, whatever happened to the file."""
    found = read_result(path, WHAT)
    if isinstance(found.content.get("settings"), dict):
        return found
    damage = found.damage or f"{path} is damaged: not {WHAT}"
    return Found({**found.content, "settings": {}}, damage)


def _stage(values: Any) -> dict[str, Any]:
    counts = {name: _whole(mapping(values)[name]) for name in ("verified", "falsified")}
    return {**counts, "seconds": _amount(values["seconds"])}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    return value


def _point(values: dict[str, Any]) -> dict[str, Any]:
    shares = {name: values[name] for name in ("natural", "adversarial", "certified")}
    return {
        "eps": str(values["eps"]),
        **{name: _whole(values[name]) for name in _COUNTS},
        **{name: None if share is None else _share(share) for name, share in shares.items()},
    }


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError("a count is expected")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < LARGEST:
        raise ValueError("a number is expected")
    return float(value)


def _share(value: Any) -> float:
    if _amount(value) > 1:
        raise ValueError("an accuracy is expected")
    return float(value)


def summarize(records: Iterable[Record], samples: int, settings: dict[str, Any]) -> Certification:
    """Count records; samples that have none yet are not in any count."""
    known = list(records)
    stages = ["natural", *settings["stages"]]
    counts = {verdict: sum(r.verdict == verdict for r in known) for verdict in Verdict}
    total = max(len(known), 1)
    return Certification(
        samples=samples,
        verified=counts[Verdict.VERIFIED],
        falsified=counts[Verdict.FALSIFIED],
        unknown=counts[Verdict.UNKNOWN],
        open=samples - len(known),
        natural=sum(r.correct for r in known) / total,
        adversarial=(len(known) - counts[Verdict.FALSIFIED]) / total
        if REFUTING.intersection(stages)
        else None,
        certified=counts[Verdict.VERIFIED] / total,
        stages={name: _stage_summary(name, known) for name in stages},
        seconds=sum(r.seconds for r in known),
        complete=len(known) == samples,
        reasons=_reasons(known),
        settings=settings,
    )


def _reasons(records: list[Record]) -> dict[str, int]:
    """Count the reasons of unknown samples, the most frequent first."""
    unknown = (r.reason for r in records if r.verdict == Verdict.UNKNOWN and r.reason)
    # What follows the colon is about one sample.
    counts = Counter(reason.partition(":")[0] for reason in unknown)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _stage_summary(name: str, records: list[Record]) -> dict[str, Any]:
    decided = [r for r in records if r.stage == name]
    return {
        "verified": sum(r.verdict == Verdict.VERIFIED for r in decided),
        "falsified": sum(r.verdict == Verdict.FALSIFIED for r in decided),
        "seconds": sum(r.times.get(name, 0.0) for r in records),
    }
