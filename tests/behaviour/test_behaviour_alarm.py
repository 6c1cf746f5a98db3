"""`verify` answers in time even where nothing looks at the clock: while libraries are loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hangs import PATIENCE

ENDLESS = """
import threading, time
from tightrope.cli.alarm import last_word
with last_word(time.monotonic() - 10, 1.0, "timeout"):
    threading.Event().wait()
"""
ENDS = """
import time
from tightrope.cli.alarm import last_word
with last_word(time.monotonic(), 1e9, "timeout"):
    pass
print("unsat")
"""
# Whoever asks for torch never gets it.
NEVER_LOADED = """
import sys, threading
class Never:
    def find_spec(self, name, *rest):
        if name == "torch":
            threading.Event().wait()
sys.meta_path.insert(0, Never())
from tightrope.cli.main import main
main(["verify", "net.onnx", "property.vnnlib", "--timeout", "0.1", *sys.argv[1:]])
"""


def said(code: str, *arguments: str) -> str:
    """Return what a process prints that has to end by itself, without an error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    return done.stdout


def test_what_does_not_end_is_ended() -> None:
    assert said(ENDLESS) == "timeout\n"


def test_what_ends_has_the_last_word() -> None:
    assert said(ENDS) == "unsat\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_loading_libraries_counts(as_json: bool) -> None:
    found = said(NEVER_LOADED, *(["--json"] if as_json else []))
    assert (json.loads(found)["result"] if as_json else found.strip()) == "timeout"
