"""Freed memory is kept for the next computation, and counts as free."""

from __future__ import annotations

import sys

import pytest
import torch

from tightrope.allocation import kept_memory, reuse_freed_memory

MEGABYTE = 1 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_freed_is_kept_and_counted() -> None:
    if not reuse_freed_memory():
        assert kept_memory() >= 0  # another C library
        return
    block = torch.zeros(100 * MEGABYTE, dtype=torch.uint8)
    before = kept_memory()
    del block
    assert kept_memory() >= before + 100 * MEGABYTE
    again = torch.zeros(100 * MEGABYTE, dtype=torch.uint8)
    assert kept_memory() < before + 100 * MEGABYTE
    assert not again.any()
