"""Small modules like those of vision libraries: a vision transformer and an MLP-Mixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token collects from all of them."""
        batch, tokens, dim = x.shape
        parts = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = (parts[:, :, i].transpose(1, 2) for i in range(3))
        found = F.scaled_dot_product_attention(query, key, value)
        return self.out(found.transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    """A transformer's block: attention, then a perceptron, both on normalised tokens."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.perceptron = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with what both parts add."""
        x = x + self.attention(self.first(x))
        return x + self.perceptron(self.second(x))


class VisionTransformer(nn.Module):
    """Patches as tokens, blocks, and a linear layer on the mean token."""

    def __init__(self, dim: int = 32, depth: int = 2, heads: int = 4, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.places = nn.Parameter(torch.randn(1, (32 // patch) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens))[:, 0])


class MixerBlock(nn.Module):
    """A perceptron across tokens, then one across channels."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.along = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens with what both parts add."""
        x = x + self.across(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.second(x))


class Mixer(nn.Module):
    """An MLP-Mixer."""

    def __init__(self, dim: int = 32, depth: int = 2, patch: int = 8) -> None:
        super().__init__()
        tokens = (32 // patch) ** 2
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens))[:, 0])
