"""The networks by name, as `tightrope nets` lists them: known without building one, or torch.

A row is for the builder of that name in `architectures.py`. Sizes are those of the network that it
builds for MNIST; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NetSummary:
    """What `tightrope nets` shows of one network: sizes for MNIST, settings with their defaults.

    `uniform` networks normalise all channels by one deviation: a ball of one radius stays one.
    """

    name: str
    layers: str
    parameters: int
    description: str
    arguments: dict[str, int | bool]
    uniform: bool = False


SUMMARIES = (
    NetSummary(
        "mlp",
        "3 linear",
        270_346,
        "fully connected; `depth` hidden layers of `width`",
        {"width": 256, "depth": 2, "batch_norm": True},
    ),
    NetSummary(
        "cnn3",
        "2 conv + 1 linear",
        24_426,
        "smallest convolutional net; width 1 is 'tiny'",
        {"width": 16, "batch_norm": True},
    ),
    NetSummary(
        "cnn4",
        "2 conv + 2 linear",
        818_218,
        "cnn3 with a hidden linear layer",
        {"width": 16, "hidden": 512, "batch_norm": True},
    ),
    NetSummary(
        "cnn5",
        "3 conv + 2 linear",
        822_106,
        "three convolutions, a good size for laptops",
        {"width": 16, "hidden": 512, "batch_norm": True},
    ),
    NetSummary(
        "cnn7",
        "5 conv + 2 linear",
        13_259_338,
        "the standard net of certified training",
        {"width": 64, "hidden": 512, "batch_norm": True},
    ),
    NetSummary(
        "cnn7-tin",
        "5 conv + 2 linear",
        3_625_546,
        "cnn7 for TinyImageNet: a second stride of 2",
        {"width": 64, "hidden": 512, "batch_norm": True},
    ),
    NetSummary(
        "convsmall",
        "2 conv + 2 linear",
        89_606,
        "DiffAI's small net, no BatchNorm",
        {"width": 16, "hidden": 100, "batch_norm": False},
    ),
    NetSummary(
        "convmed",
        "2 conv + 2 linear",
        1_637_256,
        "COLT's net for CIFAR-10 at 8/255, no BatchNorm",
        {"width": 32, "hidden": 250, "batch_norm": False},
    ),
    NetSummary(
        "convmedbig",
        "3 conv + 2 linear",
        1_653_160,
        "COLT's net for CIFAR-10 at 2/255, no BatchNorm",
        {"width": 32, "hidden": 250, "batch_norm": False},
    ),
    NetSummary(
        "resnet",
        "10 conv + 1 linear",
        304_554,
        "small residual net of `blocks` basic blocks",
        {"width": 16, "blocks": 3, "batch_norm": True},
    ),
    NetSummary(
        "linf-dist",
        "5 distance",
        3_958_795,
        "1-Lipschitz layers of l-infinity distances",
        {"width": 1024, "depth": 5},
        uniform=True,
    ),
    NetSummary(
        "sortnet",
        "5 distance",
        3_958_795,
        "linf-dist of sorted distances; `keep` percent in training",
        {"width": 1024, "depth": 5, "keep": 70},
        uniform=True,
    ),
    NetSummary(
        "sortnet-mlp",
        "3 distance + 2 linear",
        3_429_898,
        "sortnet with two linear layers at its end",
        {"width": 1024, "depth": 5, "keep": 70, "hidden": 512},
        uniform=True,
    ),
)


def describe() -> list[NetSummary]:
    """Return one summary per network."""
    return list(SUMMARIES)


def net_names() -> list[str]:
    """Return the names of all networks."""
    return [summary.name for summary in SUMMARIES]
