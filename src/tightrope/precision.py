"""Full precision wherever bounds are computed.

TF32 keeps ten bits of the mantissa: a bound computed with it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The unit of rounding that proofs are made with: the gap above 1, twice what rounding to nearest
# asks for, so that they hold whichever way operations are rounded.
ROUNDING = torch.finfo(torch.float64).eps


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
