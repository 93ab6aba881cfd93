"""Tests of this room build models of the families that those of the model room know."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "model"))
