"""Imported by every Python process that finds this folder: makes moments known to it."""

import os
import sys

if "SIGNAL_AT_A_MOMENT" in os.environ:
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from moments import install_from_environment

    del sys.path[0]
    install_from_environment()
