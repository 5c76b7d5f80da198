"""The user's hooks of every kind, and what torch puts around modules and backward passes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as modules
import torch.nn.utils.parametrizations as parametrizations
from programs import same_under
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.utils import prune

import amanda

X = torch.linspace(-1, 1, 20).reshape(5, 4)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def gradients(model: torch.nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def everything_hooked() -> list[Any]:
    log: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *_, **__: log.append(word)

    model, x = network(), X.clone().requires_grad_()
    for layer in model:
        layer.register_forward_pre_hook(note("forward pre"), with_kwargs=True)
        layer.register_forward_hook(note("forward"), with_kwargs=True, always_call=True)
        layer.register_full_backward_pre_hook(note("backward pre"))
        layer.register_full_backward_hook(note("backward"))
        layer.register_state_dict_pre_hook(note("state pre"))
        layer.register_state_dict_post_hook(note("state"))
        layer.register_load_state_dict_pre_hook(note("load pre"))
        layer.register_load_state_dict_post_hook(lambda *_: log.append("load"))
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad * 2)
        parameter.register_post_accumulate_grad_hook(note("accumulated"))
    handles = [
        modules.register_module_forward_pre_hook(note("any forward pre")),
        modules.register_module_forward_hook(note("any forward"), always_call=True),
        modules.register_module_full_backward_pre_hook(note("any backward pre")),
        modules.register_module_full_backward_hook(note("any backward")),
        modules.register_module_parameter_registration_hook(note("parameter")),
        modules.register_module_module_registration_hook(note("module")),
        modules.register_module_buffer_registration_hook(note("buffer")),
        register_multi_grad_hook([model[0].weight, model[2].bias], note("several")),
        register_multi_grad_hook([model[0].weight, model[2].bias], note("any"), mode="any"),
    ]
    try:
        with saved_tensors_hooks(lambda tensor: (log.append("pack"), tensor)[1], lambda tensor: tensor * 1.5):
            y = model(x)
        y.retain_grad()
        y.register_hook(lambda grad: grad * 2)
        y.grad_fn.register_prehook(note("node pre"))
        y.grad_fn.register_hook(note("node"))
        y.sum().backward()
        model.load_state_dict(model.state_dict())
        torch.nn.BatchNorm1d(2)
        with save_on_cpu():
            model(x).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return [log, x.grad, y.grad, *gradients(model)]


def test_hooks_of_every_kind_run_in_their_order_with_their_values(harmless: amanda.Tool) -> None:
    same_under(harmless, everything_hooked)


def test_hooks_that_are_always_called_are_called_when_the_module_fails(harmless: amanda.Tool) -> None:
    class Failing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("of the model")

    def run() -> list[str]:
        log, model = [], Failing()
        model.register_forward_hook(lambda *_: log.append("called"), always_call=True)
        with pytest.raises(ValueError, match="of the model"):
            model(X)
        return log

    same_under(harmless, run)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_parametrized_weights(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            parametrizations.weight_norm(torch.nn.Linear(4, 3)),
            parametrizations.spectral_norm(torch.nn.Linear(3, 3)),
            parametrizations.orthogonal(torch.nn.Linear(3, 3)),
            torch.nn.utils.weight_norm(torch.nn.Linear(3, 2)),
        )
        prune.l1_unstructured(model[1], "bias", 0.5)
        y = model(X)
        y.sum().backward()
        prune.remove(model[1], "bias")
        return [y, model(X), *gradients(model), *model.state_dict().values()]

    same_under(harmless, run)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_all_modes_of_training_at_once(harmless: amanda.Tool) -> None:
    def run() -> list[Any]:
        torch.use_deterministic_algorithms(True)
        single = torch.autograd.set_multithreading_enabled(False)
        try:
            model = network()
            with torch.autograd.detect_anomaly(), torch.autocast("cpu", torch.bfloat16), single:
                y = model(X)
                y.float().sum().backward()
                filled = torch.empty(3)  # with a value that no program gives
                counted = torch.zeros(5).index_add(0, torch.tensor([1, 1]), torch.ones(2))
            with torch.inference_mode():
                inferred = model(X).clone()
        finally:
            torch.use_deterministic_algorithms(False)
        return [y, filled, counted, inferred, *gradients(model)]

    same_under(harmless, run)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_an_anomaly_is_told_as_without_a_tool(harmless: amanda.Tool) -> None:
    def run() -> str:
        x = torch.zeros(1, requires_grad=True)
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values") as raised:
            (torch.sqrt(x) * 0).sum().backward()
        return str(raised.value)

    same_under(harmless, run)


def test_the_profiler_sees_the_program_beside_any_tool(harmless: amanda.Tool) -> None:
    def run(stack: bool = True) -> list[Any]:
        model = network()
        with torch.profiler.profile(record_shapes=True, with_stack=stack, with_modules=stack) as profile:
            with torch.profiler.record_function("mine"):
                y = model(X)
            y.sum().backward()
        names = [event.name for event in profile.events()]
        return [names.count("mine"), names.count("aten::addmm"), y, *gradients(model)]

    # torch keeps no copy of a function's name, and a module's code is gone after its first import: everything
    # is imported in runs without stacks, lest names be read from freed memory
    run(stack=False)
    with amanda.apply(harmless):
        run(stack=False)
    same_under(harmless, run)


@pytest.mark.parametrize("change", ["transpose_", "squeeze_", "mul_"])
def test_gradients_go_through_a_value_that_is_written_into_a_tensor_that_retains_its_own(change: str) -> None:
    arguments: Any = {"transpose_": (0, 1), "squeeze_": (0,), "mul_": (1.0,)}[change]
    x, tool = torch.ones(1, 3, requires_grad=True), amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == change:
            context.insert_after_op(amanda.differentiable(lambda y: y * 3))

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        y = x.clone()
        y.retain_grad()
        getattr(y, change)(*arguments)
        y.sum().backward()
    assert y.flatten().tolist() == [3.0] * 3
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0] * 3]


def ignore(*_: Any) -> None:
    """Do nothing, as a hook that pickles."""


def test_handle_of_a_hook_beside_the_driver_s_is_copied_and_pickled() -> None:
    handles: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda op: op.insert_before_backward_op(ignore), backward=True)
    with amanda.apply(tool):
        y = x.exp()
        node = y.grad_fn
        assert node is not None
        y.register_hook(lambda _: handles.append(node.register_prehook(ignore)))
        for _ in range(2):
            y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
    handles.append(node.register_prehook(ignore))
    for handle in handles:
        for copied in (copy.copy(handle), copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
            assert type(copied) is type(handle)
        handle.remove()
