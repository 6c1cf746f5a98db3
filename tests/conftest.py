"""Settings that all tests share: reproducible property tests on two threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tightrope.waiting import sleep_while_waiting

if TYPE_CHECKING:
    from tightrope.runs import Run

sleep_while_waiting()  # before torch is loaded

# "ci" repeats the same examples on each run; `HYPOTHESIS_PROFILE=explore` looks for new ones.
_shared = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **_shared)
settings.register_profile("explore", derandomize=False, print_blob=True, **_shared)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Prepare torch, except in a process that only hands out tests to others."""
    # Tests use slow paths of torch on purpose.
    config.addinivalue_line("filterwarnings", "ignore:Using padding='same' with even:UserWarning")
    aside = "PYTEST_XDIST_WORKER" in os.environ
    if aside or not getattr(config.option, "numprocesses", None):
        import torch

        # Tests that run side by side have one thread each.
        torch.set_num_threads(1 if aside else 2)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run a module's tests on one thread: tiny networks lose more by waiting than they gain."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def certifiable(tmp_path: Path) -> Run:
    """A small run of a test's own with samples of every verdict, to be certified at 1/10."""
    from handmade import certifiable_run

    return certifiable_run(tmp_path / "run")
