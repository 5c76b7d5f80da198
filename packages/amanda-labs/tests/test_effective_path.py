"""Effective paths on PyTorch, against an extraction element by element."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from path_reference import Weights, reference_path
from torch import Tensor, nn

import amanda
from amanda.errors import ToolError
from amanda.tools.effective_path import (
    EffectivePath,
    EffectivePathTool,
    PathError,
    Step,
    Terms,
    leading,
    union,
)


class Residual(nn.Module):
    """The network of the reference; its addition is in no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.conv2, self.bn2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.bn1(self.conv1(x)).relu_(), 2)
        x = F.relu(self.bn2(self.conv2(x)) + x)
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def residual(seed: int) -> Residual:
    torch.manual_seed(seed)
    model = Residual().double().eval()
    for norm in (model.bn1, model.bn2):
        nn.init.normal_(norm.weight)  # half of the channels are turned round
        nn.init.normal_(norm.bias, std=0.2)
        nn.init.normal_(norm.running_mean, std=0.2)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return model


def weights_of(model: Residual) -> Weights:
    norms = (model.bn1, model.bn2)
    scales = [norm.weight / (norm.running_var + norm.eps).sqrt() for norm in norms]
    biases = (model.conv1.bias, 0.0)
    shifts = [n.bias + s * (b - n.running_mean) for n, s, b in zip(norms, scales, biases, strict=True)]
    tensors = (model.conv1.weight, model.conv2.weight, model.fc.weight)
    arrays = [tensor.detach().numpy() for tensor in tensors]
    folded = [torch.stack(one).detach().numpy() for one in (scales, shifts)]
    return Weights(*arrays, *folded)


def extracted(model: Callable[[Tensor], Any], images: Tensor, **options: Any) -> list[EffectivePath]:
    tool = EffectivePathTool(**options)
    with amanda.apply(tool), torch.no_grad():
        model(images)
    return tool.paths()


def indices(mask: Any) -> set[tuple[int, ...]]:
    return {tuple(map(int, position)) for position in np.argwhere(mask)}


@pytest.mark.parametrize("theta", [0.3, 0.9])
def test_paths_are_those_that_are_extracted_element_by_element(theta: float) -> None:
    model, checked = residual(4), 0
    images = torch.rand(6, 2, 6, 4, dtype=torch.float64)
    layers = {
        "conv1/conv2d": "first", "/max_pool2d": "max", "conv2/conv2d": "second", "/add": "add",
        "/mean": "mean", "fc/linear": "linear",
    }  # fmt: skip
    for image, path in zip(images.numpy(), extracted(model, images, theta=theta), strict=True):
        reference, values = reference_path(image, weights_of(model), theta)
        assert path.label == values["scores"].argmax()
        if values["scores"].max() <= 0:
            continue
        assert list(path.layers) == list(layers)
        for name, reference_name in layers.items():
            layer = path.layers[name]
            assert len(layer.synapses) == reference.synapses[reference_name], name
            assert (
                indices(layer.mask("weights")) == reference.weights[reference_name] or not layer.weight_shape
            )
            if reference_name != "add":
                assert indices(layer.mask()) == reference.neurons[reference_name], name
                checked += len(layer.neurons)
        assert len(path.layers["/add"].neurons) == len(reference.neurons["add"])
    assert checked > 100


def test_no_smaller_set_of_contributions_reaches_the_share() -> None:
    random = np.random.default_rng(0)
    contributions = random.normal(size=(200, 7))
    value = contributions.sum(1) + random.normal(size=200)
    is_leading = leading(contributions, value, 0.6)
    for terms, of, mine in zip(contributions, value, is_leading, strict=True):
        if of <= 0:
            assert not mine.any()
            continue
        reached = terms[terms > 0].sum() >= 0.6 * of
        fewer = combinations(terms, int(mine.sum()) - 1)
        assert all(sum(some) < 0.6 * of for some in fewer)
        assert terms[mine].sum() >= 0.6 * of if reached else np.array_equal(mine, terms > 0)


def test_of_many_equal_contributions_the_first_are_taken() -> None:
    contributions = np.random.default_rng(0).normal(size=(60, 300)).round(1)
    value = np.linspace(0.5, 90, 60)
    is_leading = leading(contributions, value, 0.9)
    for terms, of, mine in zip(contributions, value, is_leading, strict=True):
        total, expected = 0.0, set()
        for i in sorted(range(300), key=lambda i: (-terms[i], i)):
            if total >= 0.9 * of - 1e-9 or terms[i] <= 0:
                break
            total += terms[i]
            expected.add(i)
        assert set(np.flatnonzero(mine)) == expected


def test_infinite_contributions_come_first_and_the_first_of_them_is_enough() -> None:
    contributions = np.array([[1.0, np.inf, np.inf, -np.inf], [np.nan, 1.0, 3.0, 2.0]])
    is_leading = leading(contributions, np.array([np.inf, np.nan]), 0.7)
    assert is_leading.tolist() == [[False, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize("seed", range(60))
def test_a_path_through_what_is_not_finite_is_found_without_a_warning(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert len(extracted(model, torch.rand(3, 4) / torch.tensor(0.0))) == 3


def test_an_absolute_threshold_takes_every_contribution_that_is_as_large() -> None:
    contributions = np.array([[0.5, 0.2, -0.9, 0.3]])
    assert leading(contributions, np.ones(1), 0.3, "absolute").tolist() == [[True, False, False, True]]


def test_the_path_of_a_sample_does_not_depend_on_its_batch() -> None:
    model = residual(0)
    images = torch.rand(5, 2, 6, 4, dtype=torch.float64)
    together = extracted(model, images)
    for i in range(5):
        (alone,) = extracted(model, images[i : i + 1])
        assert alone.jaccard(together[i]) == alone.jaccard(together[i], "neurons") == 1
        assert alone.layers["conv1/conv2d"].sizes == together[i].layers["conv1/conv2d"].sizes == (48, 960, 54)


def test_every_weight_of_a_network_without_negative_numbers_is_on_its_path_at_theta_1() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.1, 1)
    (path,) = extracted(model, torch.rand(1, 2, 7, 7) + 0.1, theta=1.0)
    convolution, linear = path.layers.values()
    assert convolution.mask("weights").all()
    assert convolution.density() == 1
    assert linear.mask("weights").sum(1).tolist() in ([36, 0], [0, 36])


class Branches(nn.Module):
    """Splits, moves, joins and products of what varies."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Conv1d(2, 2, 3, padding=2, dilation=2)
        self.out = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        left = torch.sigmoid(self.left(first)) * self.left(first).relu()
        right = F.pad(self.right(second.reshape(-1, 2, 3)).permute(0, 2, 1)[:, 1:], (1, 0))
        scores: Tensor = self.out(
            torch.cat([left, second[:, 3:], torch.stack([right, -right], 1).flatten(1)[:, :11]], 1)
        )
        return scores


def test_paths_go_through_ops_that_move_split_and_join() -> None:
    torch.manual_seed(0)
    tool = EffectivePathTool(theta=1.0)
    with amanda.apply(tool):
        Branches()(torch.rand(8, 12) + 0.1)
    path = union(tool.paths())
    assert not tool.result.missing
    assert sorted(path.layers) == ["left/linear", "left/linear.1", "out/linear", "right/conv1d"]


def rolled(x: Tensor) -> Tensor:
    return torch.roll(x, (1, -2), (2, 3)).repeat(1, 2, 1, 1)[:, 1:3]


def gathered(x: Tensor) -> Tensor:
    x = torch.cat([x[:, 1:], x[:, :1]], 1).index_select(2, torch.tensor([6, 0, 1, 2, 3, 4, 5]))
    return x[..., [2, 3, 4, 5, 0, 1]]


def turned(x: Tensor) -> Tensor:
    x = torch.stack(x.unbind(1)[::-1], 1).flip(2).roll(-1, 2).flip(2)
    return torch.cat([*reversed(x.tensor_split([2], 3))], 3)


W = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
K = torch.arange(36.0).view(2, 2, 3, 3).sin()
ONES = torch.ones(2, 1, 3, 3) / 9

SAME: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "product": [
        lambda x: F.linear(x.flatten(1)[:, :8], W), lambda x: x.flatten(1)[:, :8] @ W.T,
        lambda x: torch.addmm(torch.zeros(5), x.flatten(1).narrow(1, 0, 8), W.T),
        lambda x: torch.einsum("ni,oi->no", x.flatten(1).split([8, 76], 1)[0], W),
        lambda x: torch.bmm(x.flatten(1)[None, :, :8], W.T[None])[0],
        lambda x: torch.addbmm(
            torch.zeros(5), x.flatten(1)[:, :8].unflatten(1, (2, 4)).transpose(0, 1), W.T.unflatten(0, (2, 4))
        ),
    ],
    "convolution": [
        lambda x: F.conv2d(x, K, padding="same", dilation=2),
        lambda x: F.conv2d(F.pad(x, (2, 2, 2, 2)), K, dilation=2),
        lambda x: F.conv3d(x[:, :, None], K[:, :, None], padding=(0, 2, 2), dilation=(1, 2, 2))[:, :, 0],
    ],
    "average": [
        lambda x: F.avg_pool2d(x, 3, 2, padding=1),
        lambda x: F.conv2d(x, ONES, stride=2, padding=1, groups=2),
    ],
    "mean": [
        lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: x.mean((2, 3), keepdim=True),
        lambda x: x.sum((-1, -2)) / 42,
    ],
    "maximum": [
        lambda x: F.max_pool2d(x, (7, 2), (7, 2)), lambda x: F.adaptive_max_pool2d(x, (1, 3)),
        lambda x: x.view(-1, 2, 7, 3, 2).transpose(2, 3).amax((3, 4)),
        lambda x: torch.cat([part.amax((2, 3)) for part in x.chunk(3, 3)], 1)[:, [0, 2, 4, 1, 3, 5]],
    ],
    "moves": [rolled, gathered, turned],
    "axes": [
        lambda x: x.permute(0, 3, 1, 2), lambda x: x.transpose(1, 3).transpose(2, 3),
        lambda x: torch.movedim(x, 3, 1), lambda x: x.moveaxis((1, 2), (2, 3)), lambda x: x.swapaxes(1, 3).mT,
    ],
}  # fmt: skip


@pytest.mark.parametrize("samples", [4, 2])
def test_a_loop_over_layers_without_modules_has_the_path_of_the_layers_unrolled(samples: int) -> None:
    torch.manual_seed(1)
    images, (first, second, head) = torch.randn(samples, 6), torch.randn(3, 6, 6).unbind()

    def looped(x: Tensor) -> Tensor:
        for weight in (first, second):
            x = torch.relu(F.linear(x, weight))
        return F.linear(x, head)

    def unrolled(x: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(torch.relu(F.linear(x, first)), second)), head)

    tool = EffectivePathTool(theta=0.6)
    with amanda.apply(tool):
        for batch in (torch.randn(samples, 6), torch.randn(3, 6), images):
            looped(batch)
    paths, expected = tool.paths(), extracted(unrolled, images, theta=0.6)
    assert len(paths) == samples
    for path, expected_path in zip(paths, expected, strict=True):
        masks = [[layer.mask() for layer in side.layers.values()] for side in (path, expected_path)]
        assert len(masks[0]) == len(masks[1]) > 2
        assert all(map(np.array_equal, *masks))


@pytest.mark.parametrize("name", SAME)
def test_ways_to_compute_the_same_have_the_same_path(name: str) -> None:
    torch.manual_seed(1)
    images, identity = torch.randn(4, 2, 7, 6), torch.eye(2)[:, :, None, None]
    with torch.no_grad():
        head = torch.randn(3, SAME[name][0](images).flatten(1).shape[1])
    masks = []
    for way in SAME[name]:
        paths = extracted(
            lambda x, way=way: F.linear(way(F.conv2d(x, identity)).flatten(1), head), images, theta=0.95
        )
        masks.append([next(iter(path.layers.values())).mask() for path in paths])
    assert np.sum(masks[0]) > 4
    for other_masks in masks[1:]:
        assert np.array_equal(masks[0], other_masks)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_leads_to_the_values_that_its_product_leads_to(causal: bool) -> None:
    torch.manual_seed(0)
    head, x = nn.Linear(20, 3), torch.randn(2, 3, 2, 5, 4)
    mask = torch.rand(5, 5) > 0.3

    def fused(x: Tensor) -> Tensor:
        rule: dict[str, Any] = {"is_causal": True} if causal else {"attn_mask": mask.fill_diagonal_(True)}
        return head(F.scaled_dot_product_attention(*x.unbind(1), **rule).sum(1).flatten(1))  # type: ignore[no-any-return]

    def spelled_out(x: Tensor) -> Tensor:
        allowed = torch.ones(5, 5).tril().bool() if causal else mask
        query, key, value = x.unbind(1)
        shares = (query @ key.mT / 2).masked_fill(~allowed, -torch.inf).softmax(-1)
        return head((shares @ value).sum(1).flatten(1))  # type: ignore[no-any-return]

    for fused_path, spelled_out_path in zip(extracted(fused, x), extracted(spelled_out, x), strict=True):
        mine = fused_path.layers["/scaled_dot_product_attention"]
        theirs = spelled_out_path.layers[max(name for name in spelled_out_path.layers if "matmul" in name)]
        assert set(mine.neurons) == {index - 50 for index in theirs.neurons if index >= 50}
        assert len(mine.synapses) == len(theirs.synapses) > 0


def test_an_op_without_a_rule_ends_the_path_and_a_rule_of_the_user_leads_on() -> None:
    def flipped(step: Step, rows: Any, output: int) -> Terms:
        return Terms(
            {step.data: step.outputs[output].shape[1] - 1 - (rows % 6)[:, None] + rows[:, None] // 6 * 6}
        )

    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 2)

    def model(x: Tensor) -> Tensor:
        return second(first(x).fliplr())  # type: ignore[no-any-return]

    tool = EffectivePathTool()
    with amanda.apply(tool):
        model(torch.rand(2, 4))
    assert "fliplr" in str(tool.result)
    assert len(tool.paths()[0].layers) == 1
    paths = extracted(model, torch.rand(2, 4), rules={"fliplr": flipped})
    assert np.array_equal(paths[0].layers["/linear.1"].mask(), paths[0].layers["/linear.1"].mask())
    assert len(paths[0].layers) == 2


def test_a_path_is_of_the_label_and_the_module_that_are_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    tool = EffectivePathTool(output="0")
    with amanda.apply(tool):
        model(torch.rand(2, 4))
    assert [path.label for path in tool.paths([4, 1])] == [4, 1]
    assert set(tool.paths([4, 1])[0].layers) == {"0/linear"}
    weights = tool.paths([4, 1])[1].layers["0/linear"].mask("weights")
    assert set(np.argwhere(weights)[:, 0]) <= {1}
    with pytest.raises(PathError, match=r"labels is \[5, 0\]; linear in '0' .* gives 2 samples of 5 classes"):
        tool.paths([5, 0])


def test_what_was_computed_is_forgotten_with_the_next_pass_and_when_the_tool_is_cleared() -> None:
    model, tool = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), EffectivePathTool()
    with amanda.apply(tool):
        for count in (2, 6):
            model(torch.rand(count, 4))
    assert len(tool.paths()) == 6
    tool.clear()
    assert "There is no path" in str(tool.result)
    with amanda.apply(tool):
        model(torch.rand(1, 4))
    assert len(tool.paths()) == 1


def test_a_path_ends_where_nothing_contributes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].weight)
    (path,) = extracted(model, torch.rand(1, 1, 4, 4))
    assert list(path.layers) == ["2/linear"]
    assert path.count() == 0


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ToolError, match="theta is 'half'"):
        EffectivePathTool(theta="half")  # type: ignore[arg-type]
    with pytest.raises(ToolError, match=r"theta is 1\.5"):
        EffectivePathTool(theta=1.5)
    tool = EffectivePathTool()
    with pytest.raises(PathError, match="run the model in the tool's scope first"):
        tool.paths()
    assert tool.result.rows() == []
    with amanda.apply(tool):
        nn.Linear(3, 2)(torch.rand(2, 3))
    for labels in ([0], [0, 2], [0, 0.5], 1):
        with pytest.raises(PathError, match="2 samples of 2 classes"):
            tool.paths(labels)  # type: ignore[arg-type]
    with pytest.raises(PathError, match="no paths"):
        union([])
    with amanda.apply(tool):
        torch.rand(2, 3).relu()
    with pytest.raises(PathError, match="nothing that chooses leads to relu"):
        tool.paths()
    assert "nothing that chooses" in str(tool.result)


def test_the_union_of_paths_has_all_of_each_and_a_file_keeps_it(tmp_path: Path) -> None:
    model = residual(1)
    paths = extracted(model, torch.rand(4, 2, 6, 4, dtype=torch.float64))
    whole = union(paths)
    assert all(path.overlap(whole) == 1 for path in paths)
    assert min(path.jaccard(whole) for path in paths) < 1
    loaded = EffectivePath.load(whole.save(tmp_path / "class.npz"))
    assert loaded.jaccard(whole, "weights") == loaded.overlap(whole) == 1
    assert loaded.layers["conv1/conv2d"].weight_layout == "OIHW"
    other_path = extracted(nn.Linear(3, 2), torch.rand(1, 3))[0]
    assert other_path.overlap(whole) == 0
    (tmp_path / "other.npz").write_bytes(b"no file of numpy")
    with pytest.raises(PathError, match=r"other\.npz is no file of an effective path"):
        EffectivePath.load(tmp_path / "other.npz")


def test_the_result_is_a_table_of_densities_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tool = EffectivePathTool()
    with amanda.apply(tool):
        residual(1)(torch.rand(4, 2, 6, 4, dtype=torch.float64))
    frame = tool.result.to_pandas()
    paths = tool.paths()
    row = frame[frame["module"] == "conv1"].iloc[0]
    assert row["synapses"] == np.mean([len(path.layers["conv1/conv2d"].synapses) for path in paths])
    assert row["weights density"] == row["weights"] / 54
    saved = json.loads(tool.result.save(tmp_path / "paths.json").read_text())
    assert (saved["schema"], saved["version"]) == ("amanda.effective_path", 1)
    assert saved["paths"][0]["label"] == paths[0].label
    assert "conv1 conv2d" in tool.result.save(tmp_path / "paths.svg").read_text()
    assert tool.result.save(tmp_path / "paths.png").read_bytes()[1:4] == b"PNG"


def test_the_last_pass_counts_also_in_training_and_under_a_loss() -> None:
    model = residual(2).train()
    images = torch.rand(4, 2, 6, 4, dtype=torch.float64)
    tool = EffectivePathTool()
    with amanda.apply(tool):
        for _ in range(2):
            F.cross_entropy(model(images), torch.tensor([0, 1, 2, 3])).backward()
    training = tool.paths()
    assert list(training[0].layers)[-1] == "fc/linear"
    assert not tool.result.missing
    assert any(extracted(model.eval(), images)[i].jaccard(training[i]) < 1 for i in range(4))
