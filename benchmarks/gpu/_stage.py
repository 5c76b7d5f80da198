"""Run one stage: python _stage.py STAGE FILE SECONDS, in the environment that run.py makes."""

import importlib
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "packages/amanda-driver-torch/tests"
sys.path += map(str, [HERE.parent, HERE.parent / "paper", HERE.parents[1] / "examples", TESTS])


def main(name: str, file: str, seconds: str) -> None:
    """Run a stage; exit with 2 where there is no such device."""
    import torch
    from _device import DEVICE

    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device here, with torch {torch.__version__}; --device cpu rehearses", file=sys.stderr)
        sys.exit(2)
    from _cases import Cases

    warnings.simplefilter("ignore")  # what models and prototypes of torch warn of
    importlib.import_module(name).stage(Cases(name, Path(file), float(seconds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
