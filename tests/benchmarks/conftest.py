"""The comparison's modules lie beside its script and are no package of the product."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
