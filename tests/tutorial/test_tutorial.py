"""Every PyTorch cell of the tutorial, with the tutorial's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amanda
import amanda.tool
from amanda.tools.mapping import MappingTool


class ConvNeuralNet(nn.Module):
    def __init__(self, num_classes: int, functional: bool = False) -> None:
        super().__init__()
        self.functional = functional
        self.conv_layer1 = nn.Conv2d(in_channels=3, out_channels=32, kernel_size=3)
        self.conv_layer2 = nn.Conv2d(in_channels=32, out_channels=32, kernel_size=3)
        self.max_pool1 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.conv_layer3 = nn.Conv2d(in_channels=32, out_channels=64, kernel_size=3)
        self.conv_layer4 = nn.Conv2d(in_channels=64, out_channels=64, kernel_size=3)
        self.max_pool2 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.fc1 = nn.Linear(1600, 128)
        if not functional:
            self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.max_pool1(self.conv_layer2(self.conv_layer1(x)))
        out = self.max_pool2(self.conv_layer4(self.conv_layer3(out)))
        out = self.fc1(out.reshape(out.size(0), -1))
        out = torch.relu(out) if self.functional else self.relu1(out)
        return self.fc2(out)  # type: ignore[no-any-return]


class ForwardCounter(amanda.Tool):
    def __init__(self, op_name: str) -> None:
        super().__init__()
        self.counter = 0
        self.op_name = op_name
        self.add_inst_for_op(self.callback)

    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if self.op_name in op.__name__:
            context.insert_before_op(self.counter_op)

    def counter_op(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.counter += 1
        return inputs


class CountOPTool(ForwardCounter):
    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__(op_name)
        self.backward_counter = 0
        self.backward_op_name = backward_op_name
        self.backward_names: Counter[str] = Counter()
        self.add_inst_for_op(self.backward_callback, backward=True, require_outputs=True)

    def backward_callback(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op()
        if self.backward_op_name in op.__name__:
            self.backward_names[op.__name__] += 1
            context.insert_after_backward_op(self.counter_backward_op)

    def counter_backward_op(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.backward_counter += 1
        return inputs

    @property
    def counts(self) -> tuple[int, int]:
        return self.counter, self.backward_counter


def torch_op_name_rule(context: amanda.OpContext) -> None:
    context["op_name"] = context.get_op().__name__
    backward_op = context.get_backward_op()
    context["backward_op_name"] = backward_op.__name__ if backward_op is not None else None


def tf_op_name_rule(context: amanda.OpContext) -> None:
    raise AssertionError("a rule for tensorflow ran on an op of torch")


class MappedCountOPTool(CountOPTool):
    def __init__(self, op_name: str, backward_op_name: str) -> None:
        super().__init__(op_name, backward_op_name)
        rules = [["pytorch", torch_op_name_rule], ["tensorflow", tf_op_name_rule]]
        self.depends_on(MappingTool(rules=rules))

    def callback(self, context: amanda.OpContext) -> None:
        if self.op_name in context["op_name"]:
            context.insert_before_op(self.counter_op)

    def backward_callback(self, context: amanda.OpContext) -> None:
        if self.backward_op_name in context["backward_op_name"]:
            context.insert_after_backward_op(self.counter_backward_op)


@pytest.fixture
def image() -> Tensor:
    return torch.rand((1, 3, 32, 32))


def train_under(tool: amanda.Tool, model: nn.Module, x: Tensor) -> None:
    with amanda.tool.apply(tool):
        y = model(x)
        y = y if isinstance(y, Tensor) else y[0]
        y.backward(torch.rand_like(y))


def test_convolutions_of_a_cnn(image: Tensor) -> None:
    model = ConvNeuralNet(num_classes=10)
    tool = ForwardCounter("conv2d")
    with amanda.apply(tool):
        model(image)
    assert tool.counter == 4


def test_convolutions_of_a_cnn_and_their_backward(image: Tensor) -> None:
    tool = CountOPTool(op_name="conv2d", backward_op_name="Conv")
    train_under(tool, ConvNeuralNet(10), image)
    assert tool.counts == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CountOPTool, MappedCountOPTool])
def test_convolutions_of_resnet_50(kind: type[CountOPTool], resnet50: Callable[[], nn.Module]) -> None:
    tool = kind(op_name="conv2d", backward_op_name="Conv")
    train_under(tool, resnet50(), torch.rand((1, 3, 227, 227)))
    assert tool.counts == (53, 53)


def test_linears_of_bert(bert: Callable[..., nn.Module]) -> None:
    """The tutorial counts MmBackward; since torch 1.8 the backward of a biased linear is AddmmBackward0.

    The 73rd linear is the pooler's, which the first output does not depend on.
    """
    model = bert(hidden_size=48, num_attention_heads=4)
    tool = CountOPTool(op_name="linear", backward_op_name="Addmm")
    train_under(tool, model, torch.randint(0, 10, (1, 8)))
    assert tool.counts == (73, 72)
    tool = CountOPTool(op_name="linear", backward_op_name="Mm")
    train_under(tool, model, torch.randint(0, 10, (1, 8)))
    assert tool.counts == (73, 0)


def add_module_hooks(model: nn.Module, op_name: str, called: list[nn.Module]) -> None:
    for module in model.modules():
        if type(module).__name__ == op_name:
            module.register_forward_hook(lambda module, inputs, output: called.append(module))


@pytest.mark.parametrize(("functional", "hooks_called"), [(False, 1), (True, 0)])
def test_a_functional_relu_is_seen_where_a_module_hook_sees_none(
    functional: bool, hooks_called: int, image: Tensor
) -> None:
    model = ConvNeuralNet(num_classes=10, functional=functional)
    called: list[nn.Module] = []
    add_module_hooks(model, "ReLU", called)
    tool = CountOPTool(op_name="relu", backward_op_name="Relu")
    train_under(tool, model, image)
    assert len(called) == hooks_called
    assert tool.counts == (1, 1)


def test_one_rnn_has_many_backward_ops() -> None:
    """ "mul" matches AccumulateGrad, of which there is one for each of 4 parameters in 4 layers."""
    model = nn.RNN(input_size=128, hidden_size=128, num_layers=4, batch_first=False)
    tool = CountOPTool(op_name="rnn", backward_op_name="mul")
    train_under(tool, model, torch.rand(16, 2, 128))
    assert tool.counts == (1, 16)
    assert tool.backward_names == {"AccumulateGrad": 16}


def test_one_rnn_has_a_product_for_each_step_of_each_layer() -> None:
    model = nn.RNN(input_size=128, hidden_size=128, num_layers=4, batch_first=False)
    tool = CountOPTool(op_name="rnn", backward_op_name="Addmm")
    train_under(tool, model, torch.rand(16, 2, 128))
    assert tool.counts == (1, 4 * (16 + 1))


def compute_mask(tensor: Tensor, sparsity: float) -> Tensor:
    with torch.no_grad():
        flattened_tensor = tensor.abs().flatten()
        num_elements_to_prune = int(len(flattened_tensor) * sparsity)
        _, indices = torch.topk(flattened_tensor, num_elements_to_prune, largest=False)
        mask = torch.ones_like(flattened_tensor)
        mask[indices] = 0
    return mask.view_as(tensor)


class PruningTool(amanda.Tool):
    def __init__(self, sparsity: float) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.add_inst_for_op(self.callback)

    def callback(self, context: amanda.OpContext) -> None:
        op = context.get_op()
        if op.__name__ not in ["conv2d", "linear"]:
            return
        weight = context.get_inputs()[1]
        mask = compute_mask(weight, self.sparsity)
        context["mask"] = mask
        context.insert_before_op(self.prune_weight, inputs=[1], mask=mask)

    def prune_weight(self, weight: Tensor, mask: Tensor) -> Tensor:
        return torch.mul(weight, mask)


def test_pruning_computes_with_masked_weights(image: Tensor) -> None:
    model = ConvNeuralNet(num_classes=10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with amanda.apply(PruningTool(0.5)):
        pruned = model(image)
        again = model(image)
    assert torch.equal(pruned, again)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            mask = compute_mask(module.weight, 0.5)
            assert int(mask.sum()) == mask.numel() - mask.numel() // 2
            module.weight.data *= mask
    assert torch.equal(pruned, model(image))
    model.load_state_dict(before)
    assert not torch.equal(pruned, model(image))
