"""What certification can say of a problem; only `tightrope.certification` says it."""

from enum import StrEnum


class Verdict(StrEnum):
    """What certification can say of a sample; there is nothing else."""

    VERIFIED = "verified"
    FALSIFIED = "falsified"
    UNKNOWN = "unknown"
