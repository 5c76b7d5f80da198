"""What tests of several distributions share."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Function that imports a script of examples/ by its name."""

    def load(name: str) -> ModuleType:
        path = ROOT / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(path.parent))  # as when the script is run
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        return module

    return load


@pytest.fixture(scope="session")
def resnet50(example: Callable[[str], ModuleType]) -> Callable[[], object]:
    """Function that makes a ResNet-50 of torchvision."""
    return example("models").resnet50  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def bert(example: Callable[[str], ModuleType]) -> Callable[..., object]:
    """Function that makes a BERT of transformers, with other sizes as keywords."""
    return example("models").bert  # type: ignore[no-any-return]
