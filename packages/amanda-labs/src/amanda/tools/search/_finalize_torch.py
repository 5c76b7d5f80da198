"""Finalized models of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from amanda.options import shown
from amanda.tools.search._candidates import Activation, Candidate, Skip
from amanda.tools.search._errors import SearchError
from amanda.tools.search._finalize import changed, lost
from amanda.tools.search._padding import padded
from amanda.tools.search._weight_candidates import Convolution, WeightCandidate

if TYPE_CHECKING:
    from amanda.tools.search._site import Site


def finalized(model: Any, sites: Iterable[Site]) -> Any:
    """Return a copy of a module whose submodules are those that were chosen.

    Raises SearchError where an op is not the one op of a module of torch.nn.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise SearchError(f"SearchTool.finalize: model is {shown(model)}; give the module that was run")
    made = deepcopy(model)
    with torch.no_grad():
        for site, chosen in changed(sites):
            try:
                module = made.get_submodule(site.module)
            except AttributeError as error:
                raise lost(site, chosen, f"the model has no module {site.module!r}") from error
            new = _module(site, chosen, module)
            if isinstance(chosen, Skip) and not site.in_place:
                _write_elsewhere(site, chosen, made)
            if module is made:
                made = new
                continue
            paths = [path for path, one in made.named_modules(remove_duplicate=False) if one is module]
            for parent, _, name in (path.rpartition(".") for path in paths if new is not module):
                setattr(made.get_submodule(parent), name, new)
    return made


def _write_elsewhere(site: Site, chosen: Skip, model: Any) -> None:
    """Let modules that write to a skipped op's output, which is its input now, work out of place.

    Raises SearchError for a function that writes there.
    """
    for writer in site.writers.values():
        try:
            module = model.get_submodule(writer.module)
        except AttributeError:
            module = None
        if not hasattr(module, "inplace"):
            raise lost(site, chosen, f"{writer.type} at {writer.source} writes to its input in place")
        module.inplace = False


def _module(site: Site, chosen: Candidate, module: Any) -> Any:
    """Return the module that computes what a candidate does."""
    from torch import nn

    kinds: dict[str, Any] = {
        "relu": nn.ReLU, "relu6": nn.ReLU6, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh,
        "sigmoid": nn.Sigmoid, "elu": nn.ELU, "softplus": nn.Softplus,
    }  # fmt: skip
    is_layer = type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(chosen, Skip) and (is_layer or type(module) in (*kinds.values(), nn.Dropout, nn.LayerNorm)):
        return nn.Identity()
    if isinstance(chosen, Activation) and type(module) in kinds.values():
        return kinds[chosen.label]()
    if not is_layer or not isinstance(chosen, WeightCandidate):
        raise lost(site, chosen, f"{site.module or 'the model'} is a {type(module).__name__}")
    weight = chosen.weight(module.weight, site)
    if isinstance(chosen, Convolution):
        change = [chosen.kernel - size for size in module.kernel_size]
        own, padding = module, module.padding
        if not isinstance(padding, str):
            padding = tuple(padded(padding, module.dilation, change))
        module = type(own)(
            own.in_channels, own.out_channels, chosen.kernel, own.stride, padding, own.dilation,
            chosen.groups, own.bias is not None, own.padding_mode, own.weight.device, own.weight.dtype,
        ).train(own.training)  # fmt: skip
        module.bias = own.bias
    module.weight = nn.Parameter(weight.clone(), module.weight.requires_grad)
    if module.bias is not None:
        module.bias = nn.Parameter(chosen.bias(module.bias, site).clone(), module.bias.requires_grad)
    return module
