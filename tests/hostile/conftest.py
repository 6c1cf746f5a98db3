"""The helpers of the behaviour tests run commands here, too."""

import sys
from pathlib import Path

for folder in ("hostile", "behaviour"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
