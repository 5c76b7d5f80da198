"""Figure 13 in PyTorch: memory that use cases hold in a training step, of the step's peak."""

import sys
from pathlib import Path
from typing import Any

from _footprint import batches

sys.path.append(str(Path(__file__).parents[1]))
from _measure import script


def benchmark(quick: bool) -> dict[str, Any]:
    """Model -> batch -> bytes."""
    return batches("PyTorch", quick)


if __name__ == "__main__":
    script(benchmark, __doc__)
