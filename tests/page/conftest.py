"""A browser for all tests of the page, and a real run on MNIST to report on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chromium import find_browser, how_to_get_one
from hangs import PATIENCE
from playwright.sync_api import Browser, sync_playwright

import tightrope as tr


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium without a window; it ends with the module, and Playwright's event loop with it."""
    executable = find_browser()
    if executable is None:
        # Where the tests must have run, as in `.ci/run`, it is no excuse.
        missing = pytest.fail if os.environ.get("BROWSER_TESTS") == "required" else pytest.skip
        missing(f"no Chromium here: {how_to_get_one()}")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=executable,
            args=["--disable-gpu", "--disable-quic"],
            timeout=1000 * PATIENCE,
        )
        yield running
        running.close()


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained on MNIST for a second and certified; tests must not change it."""
    folder = tmp_path_factory.mktemp("real") / "run"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny networks lose more by waiting than they gain
    tr.train(
        out=folder,
        net="mlp",
        method="ibp",
        eps=0.01,
        epochs=4,
        width=8,
        depth=1,
        batch_norm=False,
        train_samples=1024,
        validation=64,
        batch_size=64,
        learning_rate=0.01,
        annealing_epochs=1,
        device="cpu",
    )
    stages = ("ibp", "attack", "crown-ibp")
    tr.certify(folder, samples=100, eps="8/255", steps=10, restarts=1, stages=stages)
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def run_folder(real_run: Path, tmp_path: Path) -> Path:
    """A real run of the test's own."""
    folder = tmp_path / "run"
    shutil.copytree(real_run, folder)
    return folder
