"""Certification: verdicts, each of them a theorem or a counterexample."""

from tightrope.certification.properties import Ball, Verdict
from tightrope.certification.summary import Certification

__all__ = ["Ball", "Certification", "Verdict"]
