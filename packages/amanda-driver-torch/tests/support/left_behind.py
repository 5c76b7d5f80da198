"""A step of training that makes use of all that a driver follows, and what is looked at after it failed."""

import gc
import signal
from typing import Any

import torch
from programs import bits
from restoration import Restoration
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import amanda
from amanda import interceptor
from amanda.drivers.torch._autograd import _BackwardPass
from amanda.drivers.torch._repeated_passes import PassCounts
from amanda.scope.attachment import attachment


class Twice(torch.autograd.Function):
    """The user's own function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0


class Network(torch.nn.Module):
    """A layer, a write into a view, a checkpoint and a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of x's rows."""
        y = self.layer(x)
        z = y * 1
        z[:, :2].exp_()
        recomputed = checkpoint(lambda a: a.sin(), y, use_reentrant=False)
        return torch.add(Twice.apply(recomputed), z)


class Tenfold(amanda.Tool):
    """Multiplies every gradient by ten, looks at every value, and counts the calls of its routines."""

    def __init__(self) -> None:
        self.calls = 0
        self.add_inst_for_op(lambda context: context.insert_after_op(self.look))
        self.add_inst_for_op(lambda context: context.insert_before_backward_op(self.tenfold), backward=True)

    def look(self, *values: Any) -> None:
        """Be called with the values."""
        self.calls += 1

    def tenfold(self, *grads: Any) -> Any:
        """Return the gradients times ten."""
        self.calls += 1
        return [None if grad is None else grad * 10 for grad in grads]


class Bench:
    """Trains steps, and tells what a scope that failed has left behind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x = Network(), torch.ones(2, 3, requires_grad=True)
        self._earlier = self.model(self.x).sum()  # keeps the nodes alive that store the gradients
        self.step()
        self._bare = self._gradients()
        whole = Tenfold()
        with amanda.apply(whole):
            self.step()
        self._gradients()
        self._all_calls = whole.calls
        gc.collect()
        self._restoration = Restoration()
        self._before = self._state()

    def step(self) -> None:
        """Run forward and backward."""
        self.model(self.x).sum().backward()

    def left_behind(self, tool: Any = None) -> list[str]:
        """Return what differs from before, also of gradients and of what a later scope sees."""
        self._gradients()
        state = self._state()
        differences = [name for name, value in state.items() if value != self._before[name]]
        calls = getattr(tool, "calls", None)
        self._earlier.backward(retain_graph=True)
        if bits(self._gradients()) != bits(self._bare):
            differences.append("gradients of an earlier graph")
        self.step()
        if bits(self._gradients()) != bits(self._bare):
            differences.append("gradients")
        if getattr(tool, "calls", None) != calls:
            differences.append("routines are called")
        later = Tenfold()
        with amanda.apply(later):
            self.step()
        if later.calls != self._all_calls:
            differences.append(f"a later scope sees {later.calls} of {self._all_calls}")
        self._gradients()
        return differences

    def _gradients(self) -> list[Any]:
        leaves = [self.x, *self.model.parameters()]
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def _state(self) -> dict[str, Any]:
        pointers, attributes, surroundings = self._restoration()
        leaves = [self.x, *self.model.parameters()]
        return {
            "pointers": pointers,
            "attributes": attributes,
            **surroundings,
            "scopes": list(attachment._scopes),
            "drivers": list(attachment._attached),
            "backward passes": list(_BackwardPass.under_way),
            "backward passes without hooks": list(PassCounts.unhooked.passes),
            "failure": interceptor.failure(),
            "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
            "hooks of modules": [
                (name, len(value))
                for module in self.model.modules()
                for name, value in vars(module).items()
                if "hooks" in name and value is not None
            ],
            "hooks of leaves": [(leaf._backward_hooks, leaf._post_accumulate_grad_hooks) for leaf in leaves],
            "notes of nodes": [sorted(self._earlier.grad_fn.metadata)],
        }
