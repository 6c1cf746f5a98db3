"""Settings that all tests share: reproducible property tests on two threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Helpers such as `networks` are plain modules next to this file.
sys.path.insert(0, str(Path(__file__).parent))

# Tests that run side by side have one thread each.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

# "ci" repeats the same examples on each run; `HYPOTHESIS_PROFILE=explore` looks for new ones.
_shared = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **_shared)
settings.register_profile("explore", derandomize=False, print_blob=True, **_shared)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    """Silence torch where tests use its slow paths on purpose."""
    config.addinivalue_line("filterwarnings", "ignore:Using padding='same' with even:UserWarning")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run a module's tests on one thread: tiny networks lose more by waiting than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
