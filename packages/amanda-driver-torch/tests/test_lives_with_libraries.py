"""Libraries that hook, trace and patch models themselves, running in a scope."""

from typing import Any

import pytest
import torch
from programs import same_under

import amanda

X = torch.linspace(-1, 1, 20).reshape(5, 4)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@pytest.mark.filterwarnings("ignore:Setting .* hooks", "ignore:Input Tensor")
def test_captum_attributes_the_same(harmless: amanda.Tool) -> None:
    from captum import attr

    def run() -> list[torch.Tensor]:
        model, needing = network().eval(), X.clone().requires_grad_()
        return [
            attr.IntegratedGradients(model).attribute(X, target=1, n_steps=5),
            attr.DeepLift(model).attribute(X, target=0),
            attr.Saliency(model).attribute(needing, target=0),
            attr.GuidedBackprop(model).attribute(needing, target=0),
            attr.LayerConductance(model, model[0]).attribute(X, target=0, n_steps=5),
            attr.Occlusion(model).attribute(X, (1,), target=0),
            attr.LRP(model).attribute(X, target=0),
        ]

    scope = same_under(harmless, run)
    assert scope.report == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_fvcore_counts_the_same_and_its_trace_is_said(harmless: amanda.Tool) -> None:
    from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis, parameter_count

    def run() -> list[Any]:
        model = network()
        flops = FlopCountAnalysis(model, X).unsupported_ops_warnings(False)
        activations = ActivationCountAnalysis(model, X).unsupported_ops_warnings(False)
        return [flops.total(), [*flops.by_operator().items()], activations.total(), [*parameter_count(model)]]

    scope = same_under(harmless, run)
    assert [entry.what for entry in scope.report] == ["torch.jit.trace"]


@pytest.fixture(scope="module")
def nnsight() -> Any:
    backward = torch.Tensor.backward
    import nnsight
    from nnsight._c import unmount

    # Its import leaves a backward() that parses its caller, which Python 3.11 does in one thread only,
    # and gives each object of the process a method `save`, also modules that are not loaded yet.
    torch.Tensor.backward = backward
    unmount("save")
    return nnsight


@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_nnsight_intervenes_the_same_and_the_ops_of_its_model_are_seen(
    harmless: amanda.Tool, op_log: Any, nnsight: Any
) -> None:
    def run() -> list[torch.Tensor]:
        model = nnsight.NNsight(network())
        with model.trace(X):
            hidden = nnsight.save(model[0].output)
            model[0].output[:] = 0
            output = nnsight.save(model.output)
        return [hidden, output]

    same_under(harmless, run)
    with amanda.apply(op_log):
        run()
    assert op_log.names[-3:] == ["linear", "relu", "linear"]
