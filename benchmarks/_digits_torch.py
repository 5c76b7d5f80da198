"""Studies in PyTorch; a CNN and timm's vision transformer on the digits."""

import copy
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _digits import digits
from _methods import Method, Scores
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from baselines.magnitude_torch import MagnitudePruning
from baselines.quantize_torch import lsq, ptq
from models import let_torchvision_load


class TorchStudy:
    """Models of PyTorch, on one thread."""

    layers, qat, running = ("conv2d", "linear"), "lsq", nullcontext

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def fresh(self, model: nn.Module) -> nn.Module:
        """Return a copy to work on."""
        return copy.deepcopy(model)

    def weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's own weights, by the names that they have in the dense model."""
        return {
            name.replace(".layer.", "."): parameter.detach().numpy().copy()
            for name, parameter in model.named_parameters()
            if not name.endswith(("activation.scale", "weight.scale"))
        }

    def by_hand(self, model: nn.Module, method: Method, seed: int) -> tuple[Scores, nn.Module]:
        """Return the scores of a method without tools, and the model as it then is."""
        if method.kind == "prune":
            MagnitudePruning(model, 0.5)
        elif method.kind == "ptq":
            return self.score(ptq(model, self.calibrate, method.bits)), model
        elif method.kind == "qat":
            model = lsq(model, self.calibrate, method.bits)
        if method.tune:
            self.tune(model, seed)
        return self.score(model), model


class Cnn(nn.Module):
    """Two convolutions and a classifier; activations and pooling are called as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(images)), 2)
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return self.head(hidden.flatten(1))


def vit() -> nn.Module:
    """Return timm's: patches of 2 by 2, two blocks of four heads, 32 wide."""
    let_torchvision_load()
    from timm.models import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=2, num_heads=4, num_classes=10
    )
    return model


class DigitsStudy(TorchStudy):
    """Accuracy is the share of right answers among the images kept for testing.

    epochs: of the dense model.  tuning: epochs of fine-tuning.
    """

    def __init__(self, make: Callable[[], nn.Module], epochs: int = 24, tuning: int = 5) -> None:
        super().__init__()
        self.make, self.epochs, self.tuning = make, epochs, tuning
        images, self.labels, test_images, self.test_labels = map(torch.from_numpy, digits())
        self.images, self.test_images = (
            one.permute(0, 3, 1, 2).contiguous() for one in (images, test_images)
        )

    def dense(self, seed: int) -> nn.Module:
        """Return a trained model."""
        torch.manual_seed(seed)
        model = self.make()
        self._train(model, model.parameters(), seed, self.epochs, 1.5e-3)
        return model

    def tune(self, model: nn.Module, seed: int, more: Iterable[Tensor] = ()) -> None:
        """Train on, `more` parameters too."""
        self._train(model, [*model.parameters(), *more], seed, self.tuning, 1e-3)

    def calibrate(self, model: nn.Module) -> None:
        """Run the model on some of the images for training."""
        with torch.no_grad():
            model.eval()(self.images[:256])

    def score(self, model: nn.Module) -> Scores:
        """Return the accuracy."""
        with torch.no_grad():
            right = model.eval()(self.test_images).argmax(1) == self.test_labels
        return {"accuracy": right.float().mean().item()}

    def _train(
        self, model: nn.Module, parameters: Iterable[Tensor], seed: int, epochs: int, rate: float
    ) -> None:
        model.train()
        order = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(parameters, rate)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, epochs)
        for _ in range(epochs):
            for batch in torch.randperm(len(self.images), generator=order).split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(self.images[batch]), self.labels[batch]).backward()
                optimizer.step()
            decay.step()
