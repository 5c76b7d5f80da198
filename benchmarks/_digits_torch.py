"""A CNN and timm's vision transformer on the digits, in PyTorch."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from _digits import digits
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import let_torchvision_load


class Cnn(nn.Module):
    """Two convolutions and a classifier; what lies between is called as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(images)), 2)
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return self.head(hidden.flatten(1))


def vit() -> nn.Module:
    """timm's: patches of 2 by 2, two blocks of four heads, 32 wide."""
    let_torchvision_load()
    from timm.models import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, embed_dim=32, depth=2, num_heads=4, num_classes=10
    )
    return model


class DigitsStudy:
    """How a model is trained on the digits, and how well it does.

    epochs: of the dense model.  tuning: epochs of what comes after.
    """

    measures = ("accuracy",)

    def __init__(self, make: type[Cnn] | object, epochs: int = 24, tuning: int = 5) -> None:
        self.make, self.epochs, self.tuning = make, epochs, tuning
        found = digits()
        self.images = torch.from_numpy(found.images).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.from_numpy(found.labels)
        self.test_images = torch.from_numpy(found.test_images).permute(0, 3, 1, 2).contiguous()
        self.test_labels = torch.from_numpy(found.test_labels)

    def dense(self, seed: int) -> nn.Module:
        """A trained model."""
        torch.manual_seed(seed)
        model = self.make()
        self._train(model, model.parameters(), seed, self.epochs, 1.5e-3)
        return model

    def tune(self, model: nn.Module, seed: int, more: Iterable[Tensor] = ()) -> None:
        """Train on, `more` parameters too."""
        self._train(model, [*model.parameters(), *more], seed, self.tuning, 1e-3)

    def calibrate(self, model: nn.Module) -> None:
        """Run the model on some of the images it was trained on."""
        with torch.no_grad():
            model.eval()(self.images[:256])

    def score(self, model: nn.Module) -> dict[str, float]:
        """The share of right answers among the images kept for testing."""
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
