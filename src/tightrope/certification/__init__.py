"""Certification: verdicts, each of them a theorem or a counterexample."""
