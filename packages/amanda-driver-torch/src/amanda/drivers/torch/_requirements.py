"""What of torch the driver leans on beyond its public names, and what it does where it is absent."""

import logging
from operator import attrgetter

import torch
from amanda.errors import DriverError

from ._targets import missing_parts

logger = logging.getLogger("amanda")

TESTED_VERSIONS = ("2.13",)

ESSENTIAL = (
    "_C._functorch.peek_interpreter_stack",
    "_C._get_tracing_state",
    "_C._set_grad_enabled",
    "_ops.OpOverload.__call__",
    "_ops.OpOverloadPacket.__call__",
    "autograd._get_sequence_nr",
    "autograd.graph._engine_run_backward",
    "nn.Module._call_impl",
    "nn.Module._wrapped_call_impl",
)
"""Without one of these nothing is instrumented."""

OPTIONAL = {
    "utils.checkpoint._checkpoint_without_reentrant_generator": "recomputed ops have ids of their own",
    "utils.checkpoint.CheckpointFunction.forward": "recomputed ops have ids of their own",
    "nn.parallel.parallel_apply": "threads of replicas see no scope",
    "compiler.set_stance": "compiled callables are not seen",
}
"""Without one of these, what it says."""


def is_there(path: str) -> bool:
    """Whether torch has a name."""
    try:
        attrgetter(path)(torch)
    except AttributeError:
        return False
    return True


def check() -> None:
    """Name what this torch lacks: in a warning, or in a DriverError where nothing can be instrumented."""
    tested = f"amanda-driver-torch was tested with torch {', '.join(TESTED_VERSIONS)}"
    lacking = [path for path in ESSENTIAL if not is_there(path)]
    if lacking:
        raise DriverError(
            f"torch {torch.__version__} lacks {', '.join(lacking)}, without which no op can be "
            f'instrumented; {tested}: pip install "torch=={TESTED_VERSIONS[-1]}.*", or a newer driver'
        )
    for path in missing_parts():
        logger.warning("torch %s lacks %s: its calls are not seen; %s", torch.__version__, path, tested)
    for path, consequence in OPTIONAL.items():
        if not is_there(path):
            logger.warning("torch %s lacks %s: %s; %s", torch.__version__, path, consequence, tested)
    if ".".join(torch.__version__.split(".")[:2]) not in TESTED_VERSIONS:
        logger.info("torch %s: %s", torch.__version__, tested)
