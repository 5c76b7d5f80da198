"""Run one stage: python _stage.py STAGE FILE SECONDS, in the environment that run.py makes."""

import importlib
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "packages/amanda-driver-torch/tests"
sys.path += map(str, [HERE.parent, HERE.parent / "paper", HERE.parents[1] / "examples", TESTS])


def main(name: str, file: str, seconds: str) -> None:
    """Run a stage; exit with 2 where there is no such device."""
    import torch
    from _device import ON_GPU

    if ON_GPU and not torch.cuda.is_available():
        print(f"no CUDA device here, with torch {torch.__version__}; --device cpu rehearses", file=sys.stderr)
        sys.exit(2)
    from _cases import AROUND, Cases

    cases = Cases(name, Path(file), float(seconds))
    warnings.simplefilter("ignore")  # what models and prototypes of torch warn of
    logging.getLogger("amanda").setLevel(logging.ERROR)  # reports are in the results
    try:
        importlib.import_module("models").let_torchvision_load()
        importlib.import_module(name).stage(cases)
    except Exception:
        cases.ends(AROUND, time.monotonic(), failed=traceback.format_exc())


if __name__ == "__main__":
    main(*sys.argv[1:])
