"""Full precision wherever bounds are computed.

TF32 keeps ten bits of the mantissa: a bound computed with it proves nothing. Nor does one computed
where the smallest numbers count as zero: a weight may be one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tightrope.errors import UserError

# The unit of rounding that proofs are made with: the gap above 1, twice what rounding to nearest
# asks for, so that they hold whichever way operations are rounded.
ROUNDING = torch.finfo(torch.float64).eps

SHARE = 1 << 16  # numbers that torch leaves to one thread, at most


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch TF32 off for matrix products and convolutions, and restore the setting after."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def provable() -> Iterator[None]:
    """Compute in full precision what is to be proved; an error where that cannot be."""
    if flushes():
        raise UserError(
            "torch takes the smallest numbers for zero (set_flush_denormal), so that nothing could "
            "be proved; call torch.set_flush_denormal(False) before its threads are started"
        )
    with full_precision():
        yield


def flushes() -> bool:
    """Return whether subnormal numbers count as zero in any of torch's threads."""
    normal = torch.full((SHARE * torch.get_num_threads(),), 2.0**-1000, dtype=torch.float64)
    return not torch.equal(normal * 2.0**-40 * 2.0**40, normal)
