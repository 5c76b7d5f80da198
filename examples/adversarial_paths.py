"""Tell attacked images from others by their effective paths.

    python examples/adversarial_paths.py --seeds 5

A small residual network learns scikit-learn's digits. The path of a class is the union of the paths of its
training images. An image that an attack has led astray is classed with others whose paths it shares little
of, so the overlaps of its path with those of the class it was given and of the next one, layer by layer,
give it away (Qiu et al. 2019). Detectors learn from half of the test images, and are measured on the others.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.base import ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import amanda
from amanda.tools.effective_path import EffectivePath, EffectivePathTool, union

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Network(nn.Module):
    """Two convolutions, the second with its input added to it, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.classes = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) from 0 to 1; scores (batch, 10)."""
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        scores: Tensor = self.classes(F.relu(self.second(x) + x).flatten(1))
        return scores


def trained(images: Tensor, labels: Tensor, epochs: int) -> Network:
    """A network that has seen the images so often, in batches of 64."""
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """How the loss changes with the images."""
    images = images.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(images), labels), images)
    return gradient


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, distance: float = 0.15) -> Tensor:
    """One step of the sign of the gradient. Source: Goodfellow et al. 2015."""
    return (images + distance * gradient_of(model, images, labels).sign()).clamp(0, 1)


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    distance: float = 0.15,
    step: float = 0.03,
    steps: int = 10,
) -> Tensor:
    """Small steps within a distance, from a random start. Source: Madry et al. 2018."""
    attacked = images + torch.empty_like(images).uniform_(-distance, distance)
    for _ in range(steps):
        attacked = attacked + step * gradient_of(model, attacked.clamp(0, 1), labels).sign()
        attacked = images + (attacked - images).clamp(-distance, distance)
    return attacked.clamp(0, 1)


ATTACKS: dict[str, Attack] = {"FGSM": fgsm, "PGD": pgd}


def paths_of(model: nn.Module, images: Tensor, theta: float) -> tuple[list[EffectivePath], Tensor]:
    """The effective path of each image, and the scores."""
    tool = EffectivePathTool(theta)
    with amanda.apply(tool), torch.no_grad():
        scores = model(images)
    return tool.paths(), scores


def profiles_of(model: nn.Module, images: Tensor, labels: Tensor, theta: float) -> list[EffectivePath]:
    """The path of each class: the union of those of its images that the model recognises."""
    paths, _ = paths_of(model, images, theta)
    right = [(path, int(label)) for path, label in zip(paths, labels, strict=True) if path.label == label]
    return [union(path for path, label in right if label == each) for each in range(10)]


def features_of(
    model: nn.Module, images: Tensor, profiles: list[EffectivePath], theta: float
) -> NDArray[np.float64]:
    """(images, features): overlaps by layer with the path of the class, and how much more than the next's."""
    paths, scores = paths_of(model, images, theta)
    rows = []
    for path, (first, second) in zip(paths, scores.topk(2).indices.tolist(), strict=True):
        row = []
        for part in ("synapses", "weights"):
            mine, next_ = path.overlaps(profiles[first], part), path.overlaps(profiles[second], part)
            row += [value for name in profiles[first].layers for value in (
                mine.get(name, 1.0), mine.get(name, 1.0) - next_.get(name, 1.0)
            )]  # fmt: skip
        rows.append(row)
    return np.array(rows)


@dataclass(frozen=True)
class Outcome:
    """Of one attack and one detector: the area under the ROC curve, and the share of images led astray."""

    attack: str
    detector: str
    auc: float
    success: float


def detected(seed: int, theta: float, epochs: int = 30) -> tuple[float, list[Outcome]]:
    """Accuracy on unseen digits, and how well each detector tells the images of each attack."""
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(images)), test_size=0.4, random_state=seed, stratify=labels)
    model = trained(images[train], labels[train], epochs)
    profiles = profiles_of(model, images[train], labels[train], theta)
    right = model(images[test]).argmax(1) == labels[test]
    known, truth = images[test][right], labels[test][right]
    clean, outcomes = features_of(model, known, profiles, theta), []
    for name, attack in ATTACKS.items():
        attacked = attack(model, known, truth)
        astray = (model(attacked).argmax(1) != truth).numpy()
        features = features_of(model, attacked, profiles, theta)[astray]
        for detector, auc in auc_of(clean, features, np.flatnonzero(astray), seed).items():
            outcomes.append(Outcome(name, detector, auc, float(astray.mean())))
    return float(right.float().mean()), outcomes


def auc_of(
    clean: NDArray[np.float64], attacked: NDArray[np.float64], origin: NDArray[np.int64], seed: int
) -> dict[str, float]:
    """By detector; an image and what was made of it are in the same half."""
    learn, _ = train_test_split(range(len(clean)), test_size=0.5, random_state=seed)
    learns, attacked_learns = np.isin(np.arange(len(clean)), learn), np.isin(origin, learn)
    rows = np.concatenate([clean[learns], attacked[attacked_learns]])
    labels = np.repeat([0, 1], [learns.sum(), attacked_learns.sum()])
    others = np.concatenate([clean[~learns], attacked[~attacked_learns]])
    truth = np.repeat([0, 1], [(~learns).sum(), (~attacked_learns).sum()])
    linear = LogisticRegression(max_iter=2000, class_weight="balanced")
    detectors: dict[str, ClassifierMixin] = {
        "logistic regression": make_pipeline(StandardScaler(), linear),
        "random forest": RandomForestClassifier(100, class_weight="balanced", random_state=seed),
    }
    return {
        name: float(roc_auc_score(truth, one.fit(rows, labels).predict_proba(others)[:, 1]))
        for name, one in detectors.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Detect attacked digits by their effective paths.")
    parser.add_argument("--seeds", type=int, default=5, help="so many networks, each with a seed of its own")
    parser.add_argument("--theta", type=float, default=0.9, help="see EffectivePathTool")
    options = parser.parse_args()
    runs = [detected(seed, options.theta) for seed in range(options.seeds)]
    accuracies = [accuracy for accuracy, _ in runs]
    table = Table(
        title=f"theta {options.theta:g}, {len(runs)} seeds, "
        f"accuracy {np.mean(accuracies):.1%} ± {np.std(accuracies):.1%}"
    )
    for head in ("attack", "led astray", "detector", "AUC"):
        table.add_column(head)
    for outcomes in zip(*(outcomes for _, outcomes in runs), strict=True):
        aucs, success = [one.auc for one in outcomes], np.mean([one.success for one in outcomes])
        spread = f"{np.mean(aucs):.3f} ± {np.std(aucs):.3f} ({min(aucs):.3f} to {max(aucs):.3f})"
        table.add_row(outcomes[0].attack, f"{success:.0%}", outcomes[0].detector, spread)
    Console().print(table)


if __name__ == "__main__":
    main()
