"""PyTorch's side of protected parts: the parameters that were moved, and the process that holds them."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import amanda
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.partition._channel import Bytes, Form, Link
from amanda.tools.partition._crossed import Crossed
from amanda.tools.partition._pytorch_bytes import unpacked
from amanda.tools.partition._pytorch_call import run
from amanda.tools.partition._pytorch_optimizers import Optimizers
from amanda.tools.partition._pytorch_passes import Passes
from amanda.tools.partition._pytorch_stand_ins import StandIns

_REQUIRED = RequiredNames(
    "amanda.tools.partition",
    "torch",
    "torch:Tensor._version",
    "torch:_C._current_graph_task_id",
    "torch:autograd.Variable._execution_engine.queue_callback",
)

logger = logging.getLogger("amanda")


class Protection:
    """The parameters that were moved, and the process that holds them.

    Where it is dropped without `finalize`, the process ends, and the parameters are lost with it.
    dropped: numbers of executions whose backward pass nobody can ask for any more.
    """

    def __init__(self) -> None:
        _REQUIRED.check()
        self.crossed: dict[tuple[str, int], Crossed] = {}
        self.dropped: list[int] = []
        self.stand_ins, self.passes = StandIns(), Passes()
        self._optimizers = Optimizers(self.stand_ins)
        self._numbers = itertools.count()
        self._process: weakref.finalize[Any, Any] | None = None

    @cached_property
    def link(self) -> Link:
        """Start the process, and follow the steps of optimizers from now on."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        started, this = Link({"threads": torch.get_num_threads()}), weakref.ref(self)

        def before_step(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            protection = this()
            if protection is not None:
                protection._before_step(optimizer, args, kwargs)

        hook = register_optimizer_step_pre_hook(before_step)
        self._process = weakref.finalize(self, _lose, started, hook)
        self._process.atexit = False  # the process ends when the program hangs up
        return started

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None as long as none was started."""
        return self.link.pid if self._process is not None else None

    def place(self, phase: str, key: int, kind: str, module: str, source: str) -> Crossed:
        """Return the record of what crosses at an op."""
        return self.crossed.setdefault((phase, key), Crossed(phase, kind, module, source))

    def adopt(self, context: amanda.OpContext) -> None:
        """Move the parameters and buffers that a selected op reads to the process.

        Raises ProtectError where one cannot be moved, or is read by an op that is not selected.
        """
        self.stand_ins.adopt(context, self._hold)

    def _hold(self, path: str, value: Any, form: Form, content: Bytes) -> None:
        place = self.place("hold", id(value), "parameter", path.rpartition(".")[0], "")
        header = {"kind": "hold", "path": path, "trained": value.requires_grad}
        _, _, size = self.link.call(header, [(form, content)])
        place.add([form], [], size)

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Run an op in the process; options are those of `amanda.tools.partition._pytorch_call.run`."""
        return run(self, *inputs, **options)

    def number(self) -> int:
        """Return a number for one more execution."""
        return next(self._numbers)

    def ended(self) -> Mapping[str, Sequence[int]]:
        """Return the executions and passes that the process can forget; they are returned once."""
        dropped, self.dropped = self.dropped, []
        failed, self.passes.failed = self.passes.failed, []
        return {"dropped": dropped, "failed": failed}

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Step the optimizer's protected parameters in the process."""
        header = self._optimizers.step(optimizer, args, kwargs)
        if header is not None:
            _, _, size = self.link.call(header)
            self.place("optimizer", header["optimizer"], header["name"], "", "").add([], [], size)

    def is_of(self, model: Any) -> bool:
        """Return True if a module, or a list of parameters, has what is protected, if anything is."""
        is_module = hasattr(model, "named_modules")
        own = {id(one) for one in ([*model.parameters(), *model.buffers()] if is_module else leaves([model]))}
        stand_ins = list(self.stand_ins)
        return not stand_ins or any(id(one.tensor) in own for one in stand_ins)

    def release(self) -> None:
        """Bring the values back, and end the process.  Raises ProtectError where it is gone already."""
        import torch

        try:
            with amanda.disabled(), torch.no_grad():
                for one in self.stand_ins:
                    _, tensors, _ = self.link.call({"kind": "read", "path": one.path})
                    one.tensor.detach().copy_(unpacked(*tensors[0]))
                    one.tensor.grad = None
        finally:
            self.stand_ins.clear()
            if self._process is not None and (ended := self._process.detach()) is not None:
                _end(*ended[2])


def _lose(link: Link, hook: Any) -> None:
    """End a process that nobody can reach any more."""
    logger.warning(
        "protect: the tool was dropped without finalize(model); the parameters in process %s are lost",
        link.pid,
    )
    _end(link, hook)


def _end(link: Link, hook: Any) -> None:
    hook.remove()
    link.close()


def rule(context: amanda.OpContext) -> None:
    """Put a function that makes a Protection into a context."""
    context["protection"] = Protection
