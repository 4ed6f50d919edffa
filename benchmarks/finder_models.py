"""Workloads that only the finders' benchmark needs: a small transformer over tokens."""

from __future__ import annotations

import torch
from torch import nn

from labhelpers.workloads import Batch, Workload

WORDS, LENGTH, WIDTH = 8192, 128, 256


class SmallTransformer(nn.Module):
    """Predict each token from all: (N, 128) int64 -> logits (N, 8192, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH, device=tokens.device)
        hidden = self.layers(self.words(tokens) + self.places(places))
        return self.last(hidden).transpose(1, 2)


def token_transformer() -> Workload:
    """Return a workload whose inputs are whole numbers."""

    def make_batch(batch_size: int, device: torch.device) -> Batch:
        tokens = torch.randint(WORDS, (batch_size, LENGTH), device=device)
        return tokens, tokens.roll(-1, dims=1)

    return Workload("small transformer", SmallTransformer, make_batch)
