"""The controller of ENAS: an LSTM whose decisions depend on those before, trained by REINFORCE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import amanda
from amanda.options import NonNegativeFloat, PositiveFloat, Range, Seed, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.search._controllers import Architecture, Space
from amanda.tools.search._errors import SearchError

if TYPE_CHECKING:
    from torch import Tensor


class LSTMPolicy:
    """An LSTM that takes one decision after the other (Pham et al. 2018, sec. 2.2), in PyTorch.

    The LSTM reads the decision before, and a linear layer of each choice gives the logits of its candidates.
    It is trained by REINFORCE with a moving average of the metric as baseline, one step of Adam for each
    trial.  hidden: size of the state.  rate: of Adam.  decay: of the baseline.  entropy: weight of the
    entropy, which is added to the metric.  temperature, bound: logits are bound * tanh(logits / temperature).
    seed: of the parameters at the start.
    """

    @checked(error=SearchError)
    def __init__(
        self,
        hidden: Annotated[int, Range(1, 65_536)] = 64,
        rate: NonNegativeFloat = 0.01,
        decay: Share = 0.9,
        entropy: NonNegativeFloat = 1e-4,
        temperature: PositiveFloat = 5.0,
        bound: NonNegativeFloat = 2.5,
        seed: Seed = 0,
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise SearchError("LSTMPolicy: it needs PyTorch: pip install torch") from error
        self._torch, self._hidden, self._rate, self._decay = torch, hidden, rate, decay
        self._entropy, self._temperature, self._bound, self._seed = entropy, temperature, bound, seed
        self._made: Any = None
        self._optimizer: Any = None
        self._baseline: float | None = None

    def ask(self, space: Space, numbers: np.random.Generator) -> Architecture:
        """Return an architecture drawn decision by decision."""
        found: Architecture = {}

        def draw(name: str, chances: Tensor) -> int:
            shares = chances.detach().double().numpy()
            index = int(numbers.choice(len(shares), p=shares / shares.sum()))
            found[name] = space[name][index]
            return index

        with amanda.disabled(), self._torch.no_grad():
            self._run(space, draw)
        return found

    def tell(self, space: Space, architecture: Mapping[str, str], scores: Sequence[float]) -> None:
        """Make the decisions of an architecture more probable if it was better than the baseline."""
        if not scores:
            return
        known = scores[0] if self._baseline is None else self._baseline
        self._baseline = self._decay * known + (1 - self._decay) * scores[0]
        with amanda.disabled(), self._torch.enable_grad():
            chosen, entropy = self._run(
                space, lambda name, chances: list(space[name]).index(architecture[name])
            )
            loss = -(scores[0] - known) * chosen - self._entropy * entropy
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

    def _run(self, space: Space, decide: Any) -> tuple[Tensor, Tensor]:
        """Take the decisions; return the logarithm of their probability, and the entropies' sum."""
        torch = self._torch
        if self._made is None:
            self._make(space)
        state, read = None, self._made["first"].weight
        chosen = entropy = torch.zeros(())
        for number, name in enumerate(space):
            state = self._made["cell"](read, state)
            logits = self._made["heads"][number](state[0][0])
            logs = torch.log_softmax(self._bound * torch.tanh(logits / self._temperature), -1)
            index = decide(name, logs.exp())
            chosen, entropy = chosen + logs[index], entropy - (logs.exp() * logs).sum()
            read = self._made["words"][number].weight[index : index + 1]
        return chosen, entropy

    def _make(self, space: Space) -> None:
        """Make the parameters, uniform between -0.1 and 0.1 as in the paper."""
        torch, nn, size = self._torch, self._torch.nn, self._hidden
        with torch.random.fork_rng(devices=[]):  # the numbers of the user's model stay
            torch.manual_seed(self._seed)
            made: Any = nn.ModuleDict({
                "cell": nn.LSTMCell(size, size),
                "heads": nn.ModuleList(nn.Linear(size, len(labels)) for labels in space.values()),
                "words": nn.ModuleList(nn.Embedding(len(labels), size) for labels in space.values()),
                "first": nn.Embedding(1, size),
            })  # fmt: skip
            for one in made.parameters():
                nn.init.uniform_(one, -0.1, 0.1)
        self._made, self._optimizer = made, torch.optim.Adam(made.parameters(), self._rate)
