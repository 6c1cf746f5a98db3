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
UNREAD = """
import io, os, sys, threading, time
from tightrope.cli.alarm import last_word
class Gone(io.StringIO):
    def flush(self):
        raise BrokenPipeError
sys.stdout, sys.stderr = Gone(), Gone()
with last_word(time.monotonic() - 10, 1.0, "timeout"):
    time.sleep(1)
os.write(1, b"unsat")
"""
# The answer comes while an alarm is about to speak, slowly.
LATE = """
import threading, time
from pathlib import Path
from tightrope.certification import instances
from tightrope.certification.problem import CHOICES
spoken = threading.Event()
def send(outcome):
    spoken.set()
    time.sleep(0.5)
    print(outcome.result, flush=True)
def verify_and_tell(*files, **options):
    spoken.wait()
    raise ValueError
instances.verify_and_tell, instances.ENDED = verify_and_tell, 0.0
try:
    one = instances.Instance("a.onnx", "a.vnnlib", 0.01, Path("."))
    instances._Prepare(0, CHOICES, "cpu").decide(one, send)
finally:
    print("the next one")
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


def test_what_nobody_reads_is_no_reason_to_go_on() -> None:
    assert said(UNREAD) == ""


def test_an_instance_that_was_given_up_says_nothing_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (1, "timeout\n"), done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_loading_libraries_counts(as_json: bool) -> None:
    found = said(NEVER_LOADED, *(["--json"] if as_json else []))
    assert (json.loads(found)["result"] if as_json else found.strip()) == "timeout"
