"""Digits and trainers for tests of the trainer."""

import torch

from tightrope import nets
from tightrope.training.settings import Settings
from tightrope.training.trainer import Trainer

CPU = torch.device("cpu")
SHAPE = (1, 28, 28)


def build(batch_norm=True, width=2, seed=0):
    torch.manual_seed(seed)
    return nets.build("cnn3", SHAPE, 10, width=width, batch_norm=batch_norm)


def make(module=None, **given):
    """Return a trainer of a small network."""
    module = build() if module is None else module
    settings = Settings.parse({"epochs": 2, **given}).resolve(normalize=False, network={})
    return Trainer(module, SHAPE, settings, settings.objective(), CPU)


def flat(structure):
    """List the leaves of nested containers, tensors as lists of bits."""
    if isinstance(structure, dict):
        return [(k, leaf) for k, v in structure.items() for leaf in flat(v)]
    if isinstance(structure, list | tuple):
        return [leaf for v in structure for leaf in flat(v)]
    if isinstance(structure, torch.Tensor):
        return [(structure.dtype, structure.tolist())]
    return [structure]
