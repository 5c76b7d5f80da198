"""Token pruning by hand: the source of BERT's encoder, in which attention drops tokens.

Every network is written anew for it, here BERT as transformers has it.
Sources: Guan et al. 2022, "Transkimmer"; Goyal et al. 2020, "PoWER-BERT", for the score.
"""

import math

import torch
from torch import Tensor, nn


class SkimmedBert(nn.Module):
    """A BERT whose attentions keep, of the tokens that they are given, those most attended to.

    keep: share that each attention keeps.  protect: so many first tokens stay.
    """

    def __init__(self, bert: nn.Module, keep: float = 0.7, protect: int = 1) -> None:
        super().__init__()
        self.bert, self.keep, self.protect = bert, keep, protect
        self.masks: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states (N, T, width) of the last layer; a dropped token's are those it was dropped with."""
        hidden, alive, count = self.bert.embeddings(tokens), None, tokens.shape[1]
        self.masks = []
        for layer in self.bert.encoder.layer:
            probabilities = self.attention(layer.attention.self, hidden, alive)
            left, count = self.left(probabilities, alive, count)
            made = self.read(layer.attention, hidden, probabilities)
            made = made if alive is None else torch.where(alive[..., None] > 0, made, hidden)
            inner = layer.intermediate.intermediate_act_fn(layer.intermediate.dense(made))
            output = layer.output
            out = output.LayerNorm(output.dropout(output.dense(inner)) + made)
            hidden = out if alive is None else torch.where(alive[..., None] > 0, out, made)
            alive = left
            self.masks.append(left)
        return hidden

    def attention(self, attention: nn.Module, hidden: Tensor, alive: Tensor | None) -> Tensor:
        """Probabilities (N, H, T, T), of which dropped tokens have no part."""
        query, key = (self.split(attention, one(hidden)) for one in (attention.query, attention.key))
        scores = query @ key.transpose(-2, -1) * attention.attention_head_size**-0.5
        probabilities = scores.softmax(-1)
        if alive is None:
            return probabilities
        kept = probabilities * alive[:, None, None]
        return kept / kept.sum(-1, keepdim=True) * alive[:, None, :, None]

    def left(self, probabilities: Tensor, alive: Tensor | None, count: int) -> tuple[Tensor, int]:
        """0/1 of the tokens for later layers, and how many they are."""
        score = probabilities.detach().sum((1, 2))
        if alive is not None:
            score = score * alive + alive - 1
        score[:, : self.protect] += 1e6
        count = max(math.ceil(self.keep * count), self.protect)
        largest = score.argsort(dim=-1, descending=True, stable=True)[:, :count]
        return torch.zeros_like(score).scatter(1, largest, 1.0), count

    def read(self, attention: nn.Module, hidden: Tensor, probabilities: Tensor) -> Tensor:
        """What attention makes of the values, behind its residual connection and normalisation."""
        value = self.split(attention.self, attention.self.value(hidden))
        mixed = (attention.self.dropout(probabilities) @ value).transpose(1, 2).flatten(2)
        return attention.output.LayerNorm(attention.output.dropout(attention.output.dense(mixed)) + hidden)

    @staticmethod
    def split(attention: nn.Module, projected: Tensor) -> Tensor:
        """(N, T, width) by heads: (N, H, T, width of a head)."""
        shape = (*projected.shape[:2], attention.num_attention_heads, attention.attention_head_size)
        return projected.view(shape).transpose(1, 2)
