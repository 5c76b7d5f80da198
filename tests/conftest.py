"""What tests of several distributions share: models of torchvision and transformers, without weights."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


def _declare_torchvision_ops() -> None:
    """Let torchvision's Python load beside a torch that its binary was not built for.

    Its import describes two operators of the binary, which only detection models call.
    """
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


_declared: list[torch.library.Library] = []


@pytest.fixture(scope="session")
def torchvision_models() -> ModuleType:
    """The module torchvision.models."""
    if not hasattr(torch.ops.torchvision, "nms"):
        _declare_torchvision_ops()
    return importlib.import_module("torchvision.models")


@pytest.fixture(scope="session")
def example() -> object:
    """Function that imports a script of examples/ by its name."""

    def load(name: str) -> ModuleType:
        path = ROOT / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load
