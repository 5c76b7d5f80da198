"""Places where torch leaves the call: checkpoints, and compiled callables."""

import functools
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils.checkpoint
from amanda import interceptor
from amanda.backend import Attributes, Recomputation, recomputed, replayed
from amanda.scope import in_force

from ._asked import OP_BY_OP, asks_for_graphs, has_stances
from ._autograd import of_pass
from ._collectives import tell_of_reducers
from ._control_flow import UTILS, run_map_op_by_op
from ._op_by_op import tell
from ._operators import Operators
from ._requirements import found, log_once

if TYPE_CHECKING:
    from ._driver import TorchDriver


LOADER = "torch.utils.data.dataloader"
IN_WORKERS = "their ops are not seen: they run in processes without the scope; num_workers=0 shows them"
_RESET = "_MultiProcessingDataLoaderIter._reset"
_GENERATOR = "_checkpoint_without_reentrant_generator"

MACHINERY = {
    ("torch.export._trace", "_export"): ("torch.export", "the ops are recorded as they are"),
    ("torch.cuda.graphs", "CUDAGraph.replay"): (
        "replays of CUDA graphs",
        "what a graph recorded runs as it is",
    ),
    ("torch._subclasses.meta_utils", "MetaConverter.__call__"): None,
    ("torch._subclasses.fake_tensor", "FakeTensorMode.__torch_dispatch__"): None,
    ("torch._library.utils", "Kernel.__call__"): None,  # what a program registers by `register_fake`
    ("torch", "_as_tensor_fullprec"): None,  # by which compiled code is given a number
    ("torch.utils.checkpoint", "_detach_helper"): None,  # by which selective checkpoints keep what ops made
    # A distributed tensor's op is tried out on fake tensors, to know the shapes of what it gives.
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_non_cached"): None,
}
"""Functions of torch whose ops are none of the user's, and what is to be said of those that run a program."""


class Surroundings:
    """Changes that the driver makes around ops until its attributes are restored.

    stance: that of dynamo which it has set.  stance_before: that of the user before.
    """

    stance: ClassVar[Any] = None
    stance_before: ClassVar[Any] = None

    def __init__(self, driver: "TorchDriver") -> None:
        self._driver = driver
        self._operators = Operators()

    def enter(self, attributes: Attributes) -> None:
        """Put everything in place."""
        attributes.on_restore(self._operators.close)
        self._operators.open()
        self._follow_checkpoints(attributes)
        self._follow_futures(attributes)
        tell_of_reducers(attributes)
        for module, name in MACHINERY:
            attributes.when_imported(module, functools.partial(_let_be, attributes, module, name))
        attributes.when_imported(LOADER, lambda: _tell_of_workers(attributes))
        attributes.when_imported(UTILS, lambda: run_map_op_by_op(attributes))
        # Compiled callables run their Python code: dynamo's stance, as soon as there is a dynamo.
        attributes.when_imported("torch._dynamo", lambda: self._take_stance(attributes))

    @staticmethod
    def _follow_checkpoints(attributes: Attributes) -> None:
        """Recompute where the first run was, so that the ops are the executions of the first run."""
        checkpoint = torch.utils.checkpoint
        generator = found(f"utils.checkpoint.{_GENERATOR}")
        forward = found("utils.checkpoint.CheckpointFunction.forward")

        def generate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
            if interceptor.active() is None or not torch.is_grad_enabled():
                return (yield from generator(fn, *args, **kwargs))
            # The generator surrounds the first run, and calls the function to recompute alone.
            recomputation = Recomputation()
            again = _within_pass(functools.partial(recomputation.again, fn))
            with recomputation.first():
                return (yield from generator(again, *args, **kwargs))

        def run_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, _within_pass(recomputed(run_function)), *args)

        hook = found("utils.checkpoint._recomputation_hook.__init__")

        def make_hook(self: Any, *args: Any, **kwargs: Any) -> None:
            hook(self, *args, **kwargs)
            self.pack_hook = _alone(self.pack_hook)

        if hook is not None:
            attributes.set(checkpoint._recomputation_hook, "__init__", functools.wraps(hook)(make_hook))
        if generator is not None:
            attributes.set(checkpoint, _GENERATOR, functools.wraps(generator)(generate))
        if forward is not None:
            run = staticmethod(functools.wraps(forward)(run_forward))
            attributes.set(checkpoint.CheckpointFunction, "forward", run)

    @staticmethod
    def _follow_futures(attributes: Attributes) -> None:
        """Run what follows a collective where it was asked for, whichever thread comes to it."""
        for name in ("then", "add_done_callback"):
            original = found(f"_C.Future.{name}")
            if original is not None:
                attributes.set(torch._C.Future, name, _with_callback_in_place(original))

    @classmethod
    def leaves_stance(cls, stance: Any) -> bool:
        """Return True if the user has taken no stance but to compile, so that it is for scopes to say how."""
        if stance is cls.stance:
            return getattr(cls.stance_before, "stance", "default") != "force_eager"
        return stance.stance == "default" and stance.backend is None

    @staticmethod
    def _take_stance(attributes: Attributes) -> None:
        if not has_stances():
            _run_frames_as_they_are(attributes)
            return
        taken: list[Any] = []
        attributes.on_restore(lambda: _leave_stance(taken))  # first: an interrupt may come at any call
        taken.append(torch.compiler.set_stance("force_eager"))
        Surroundings.stance_before = getattr(taken[0], "prev", None)
        Surroundings.stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


def _within_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in the state of a backward pass, also on a thread of autograd's engine."""

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        around = of_pass()
        with nullcontext() if around is None else in_force(around):
            return function(*args, **kwargs)

    return run


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch's machinery, whose ops are none of the user's."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with interceptor.Suspension():
            return function(*args, **kwargs)

    return run


def _leave_stance(taken: Sequence[Any]) -> None:
    """Go back to the stance from before, unless the program has taken one meanwhile.

    taken: torch's context of the stance; nothing if an interrupt came first.
    """
    if taken and getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None) is Surroundings.stance:
        taken[0].__exit__(None, None, None)


def _run_frames_as_they_are(attributes: Attributes) -> None:
    """Keep a dynamo without stances from compiling in a scope, and from running what it has compiled."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    names = [name for name in ("set_eval_frame", "_maybe_set_eval_frame") if hasattr(module, name)]
    skip_code = getattr(module, "skip_code", None)
    if not names or skip_code is None:
        log_once(logging.WARNING, f"torch {torch.__version__}: compiled callables are not seen")
        return
    original = getattr(module, names[0])

    def set_eval_frame(callback: Any) -> Any:
        before = original(None)  # nothing below is compiled
        activation = interceptor.active()
        if activation is None or not callable(callback):
            original(callback)
        else:
            if asks_for_graphs(activation.state):
                activation.state.report(f"graphs of torch.compile with torch {torch.__version__}", OP_BY_OP)
            tell(activation.state, sys._getframe(1))
        return before

    skip_code(set_eval_frame.__code__)
    for name in names:
        attributes.set(module, name, set_eval_frame)


def let_compiler_look_again() -> None:
    """Drop dynamo's list of torch's callables, which holds those that the attributes had when it was made."""
    forget = getattr(sys.modules.get("torch._dynamo.trace_rules"), "clear_lru_cache", None)
    if forget is not None:
        forget()


def _let_be(attributes: Attributes, module: str, name: str) -> None:
    """Run a function of torch's own as without a scope, and say so where it runs the user's program."""
    *owners, method = name.split(".")
    holder: Any = sys.modules[module]
    for owner in owners:
        holder = getattr(holder, owner, None)
    function = getattr(holder, method, None)
    if function is None:
        return
    said = MACHINERY[module, name]

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is not None and said is not None:
            activation.state.report(*said)
        with interceptor.Suspension():
            return function(*args, **kwargs)

    attributes.set(holder, method, alone)


def _tell_of_workers(attributes: Attributes) -> None:
    """Report a pass through a DataLoader whose worker processes run the ops of its data set."""
    reset = found(f"utils.data.dataloader.{_RESET}")
    if reset is None:
        return

    @functools.wraps(reset)
    def reset_and_tell(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        activation = interceptor.active()
        if activation is not None:
            activation.state.report("worker processes of a DataLoader", IN_WORKERS)
        return reset(iterator, *args, **kwargs)

    owner = sys.modules[LOADER]._MultiProcessingDataLoaderIter
    attributes.set(owner, "_reset", reset_and_tell)


def _with_callback_in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(future: Any, callback: Callable[..., Any]) -> Any:
        return original(future, replayed(callback))

    return method
