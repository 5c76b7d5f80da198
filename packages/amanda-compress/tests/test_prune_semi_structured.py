"""2:4 weights in the form that GPUs multiply, up to the call that needs a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.sparse import _semi_structured_conversions as conversions

from amanda.tools.prune import PruneError, PruneTool


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(64, 64, 1), nn.Flatten(0, 1), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
    ).bfloat16()


X = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def pruned(**options: Any) -> tuple[nn.Sequential, PruneTool]:
    model, tool = network(), PruneTool(pattern="2:4", **options)
    with torch.no_grad():
        tool.prepare(model, X)
    return model, tool


def test_without_a_gpu_an_error_says_so_and_nothing_is_written() -> None:
    model, tool = pruned()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PruneError, match=r"2.weight \(2 so\): it is on cpu; GPUs of NVIDIA .*to\('cuda'\)"):
        tool.finalize(model, semi_structured=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_given_to_the_gpu_is_whole_in_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that needs a GPU is replaced by PyTorch's own compression on the host, and its inverse."""
    model, tool = pruned()
    masked = copy.deepcopy(model)
    given = []

    def compressed(weight: Tensor) -> Tensor:
        assert weight.is_contiguous()
        given.append(tuple(weight.shape))
        if weight.shape[0] == 128:
            raise RuntimeError("extents that PyTorch refuses")
        return conversions.sparse_semi_structured_to_dense_cutlass(
            *conversions.sparse_semi_structured_from_dense_cutlass(weight)
        )

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", compressed)
    monkeypatch.setattr("amanda.tools.prune._result._DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    result = tool.finalize(model, semi_structured=True)
    again = PruneTool(pattern="2:4")
    again.prepare(masked, X)
    again.finalize(masked)
    assert given == [(128, 64), (64, 128)]
    assert torch.equal(model(X), masked(X))
    assert not model[4].weight.requires_grad
    assert model[2].weight.requires_grad
    assert result.dense == {
        "0.weight": "it is a weight of Conv1d, not the whole one of a linear layer",
        "2.weight": "extents that PyTorch refuses",
    }
    assert "2.weight stays dense: extents that PyTorch refuses." in str(result)


def test_an_old_gpu_and_a_wide_type_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda.tools.prune._result._DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    model, tool = pruned()
    with pytest.raises(PruneError, match=r"its GPU has compute capability 7.5; it takes 8.0"):
        tool.finalize(model, semi_structured=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    wide, tool = network().float(), PruneTool(pattern="2:4")
    tool.prepare(wide, X.float())
    with pytest.raises(PruneError, match="it is float32; give float16 or bfloat16"):
        tool.finalize(wide, semi_structured=True)


def test_other_patterns_and_models_are_refused() -> None:
    model, tool = pruned(permute=True)
    with pytest.raises(PruneError, match="pattern 2:4, not 2:4 with permute=True"):
        tool.finalize(model, semi_structured=True)
    with pytest.raises(PruneError, match="pattern 2:4, not unstructured"):
        PruneTool().finalize(model, semi_structured=True)
    model, tool = pruned()
    with pytest.raises(PruneError, match=r"a list; semi_structured=True is for a torch.nn.Module"):
        tool.finalize(list(model.parameters()), semi_structured=True)
    with pytest.raises(PruneError, match="none of them is pruned"):
        tool.finalize(network(), semi_structured=True)
