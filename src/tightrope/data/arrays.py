"""Reading `.npz` files that may be damaged or not ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tightrope.errors import UserError


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays called `keys`; nothing in the file is ever unpickled."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise UserError(f"{path} is a single array; save {', '.join(keys)} with numpy.savez")
        with loaded:
            missing = [key for key in keys if key not in loaded.files]
            if missing:
                raise UserError(
                    f"{path} lacks {', '.join(missing)} (it holds: "
                    f"{', '.join(loaded.files) or 'nothing'})"
                )
            return {key: loaded[key] for key in keys}
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in any way at all
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is damaged or not an .npz file ({reason})") from None
