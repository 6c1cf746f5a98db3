"""Pictures inside the page: arrays of pixels as PNG data URIs."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

# A grey image's perturbation: darker pixels towards blue, lighter ones towards orange.
DARKER, NEUTRAL, LIGHTER = (
    np.array(color, dtype=np.float64) for color in ((33, 102, 172), (244, 244, 242), (190, 80, 12))
)


def is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether samples of this shape [C, H, W] can be shown."""
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape) > 0


def picture(pixels: np.ndarray) -> str:
    """Return pixels [C, H, W] in [0, 1] as a data URI."""
    shades = np.rint(np.clip(pixels, 0.0, 1.0) * 255).astype(np.uint8)
    return _encode(shades[0] if len(shades) == 1 else shades.transpose(1, 2, 0))


def signed_picture(change: np.ndarray, largest: float) -> str:
    """Return a change of pixels, amplified so that `largest` gets the full colour.

    Grey images get two colours for the two signs, colour images are shown around middle grey.
    """
    share = np.clip(change / largest, -1.0, 1.0) if largest > 0 else np.zeros_like(change)
    if len(share) == 1:
        weight = np.abs(share[0])[..., None]
        ends = np.where(share[0][..., None] < 0, DARKER, LIGHTER)
        return _encode(np.rint(NEUTRAL + weight * (ends - NEUTRAL)).astype(np.uint8))
    return picture(0.5 + 0.5 * share)


def _encode(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
