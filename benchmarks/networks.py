"""Networks in the state in which the methods work: annealed to the target radius by IBP."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tightrope import data, nets
from tightrope.graph import trace
from tightrope.training.initialization import initialize
from tightrope.training.objectives import IBP
from tightrope.training.schedules import RadiusSchedule
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import make_optimizer

RADIUS = 0.1
BATCH = {"tiny": 256, "cnn3": 256, "cnn7": 64}
STEPS = {"tiny": 600, "cnn3": 600, "cnn7": 100}
ARGUMENTS = {"tiny": {"width": 1, "batch_norm": False}}


def build(net: str) -> tuple[data.Dataset, nn.Module]:
    """Return the data and the network at the start of training."""
    dataset = data.load_dataset("mnist")
    torch.manual_seed(0)
    name = "cnn3" if net == "tiny" else net
    module = nets.build(
        name,
        dataset.input_shape,
        10,
        normalize=(dataset.mean, dataset.std),
        **ARGUMENTS.get(net, {}),
    )
    return dataset, module.train().to(memory_format=torch.channels_last)


def endless(batches: data.Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Repeat the batches for ever."""
    while True:
        yield from batches


@dataclass(frozen=True)
class State:
    """A network in training, and its optimiser."""

    network: dict[str, Tensor]
    optimizer: dict[str, Any]


def annealed_state(net: str) -> State:
    """Train by IBP over a short annealing and return the state of the training.

    The optimiser belongs to it: the first steps of a new one would upset the network.
    """
    dataset, module = build(net)
    graph = trace(module, dataset.input_shape)
    initialize(graph)
    optimizer = make_optimizer(module, Settings())
    step = Step(graph, IBP(), target=RADIUS, regularizer_weight=0.5)
    count = STEPS[net]
    schedule = RadiusSchedule(RADIUS, 0, 3 * count // 4, "smooth")
    batches = endless(dataset.training_batches(BATCH[net], drop_last=True))
    for i in range(count):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        step(x, y, schedule(i), annealing=i < 3 * count // 4)
        nn.utils.clip_grad_norm_(module.parameters(), 10.0)
        optimizer.step()
    return State(copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict()))
