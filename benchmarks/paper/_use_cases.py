"""The five use cases of the paper's evaluation, as tools of Amanda."""

from collections.abc import Callable, Mapping

import amanda

USE_CASES: Mapping[str, Callable[[], amanda.Tool]] = {
    "tracing": lambda: amanda.load_tool("trace"),
    "FLOPs": lambda: amanda.load_tool("flops"),
    "effective path": lambda: amanda.load_tool("effective_path"),
    "pruning": lambda: amanda.load_tool("prune", sparsity=0.5),
    "QAT": lambda: amanda.load_tool("quantize", method="qat"),
}
QUICK = ("tracing", "pruning")


def use_cases(quick: bool) -> Mapping[str, Callable[[], amanda.Tool]]:
    """All of them; of a quick run two."""
    return {name: make for name, make in USE_CASES.items() if not quick or name in QUICK}
