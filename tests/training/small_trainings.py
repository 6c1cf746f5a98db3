"""Trainings that take a moment."""

import torch
from torch import nn

from tightrope.training.settings import Settings
from tightrope.training.trainer import Trainer

CPU = torch.device("cpu")


def resolve(data_default=False, network=None, **given):
    """Parse and resolve; `data_default` is whether the data set normalises by itself."""
    return Settings.parse(given).resolve(normalize=data_default, network=network or {})


def train(trainer, batches, validation=None):
    """Train and return the records, without what a clock says, and the selections."""
    records, selections = [], []

    def on_epoch(_, record, selected):
        timeless = {k: v for k, v in record.items() if "seconds" not in k}
        assert record["seconds"] > 0
        records.append(timeless)
        selections.append(selected)

    trainer.run(batches, validation, on_epoch=on_epoch)
    return records, selections


def tiny(batches=4, samples=4, classes=2):
    """A few batches of two-pixel images."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(samples, 2, generator=generator), torch.arange(samples) % classes)
        for _ in range(batches)
    ]


def tiny_trainer(module=None, **given):
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = Settings.parse(given).resolve(normalize=False, network={})
    return Trainer(module, (2,), settings, settings.objective(), CPU)
