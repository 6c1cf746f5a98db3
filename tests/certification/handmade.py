"""Networks with weights set by hand, their run folders, and their values as fractions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tightrope import nets
from tightrope.certification.cascade import Samples, decide
from tightrope.certification.stages import STAGES, StageSettings
from tightrope.certification.subjects import Subject
from tightrope.runs import Run
from tightrope.runs.journal import Record
from tightrope.training.settings import Settings

Rows = Sequence[Sequence[float]]
Layer = tuple[Rows, Sequence[float]]  # weight and bias

# x, y and label; the comments are the verdicts that `blind_spot` deserves at radius 1/10.
SAMPLES = [
    (0.875, 0.0, 0),  # verified
    (0.25, 0.0, 0),  # falsified: wrong from the start
    (0.5625, 0.0, 0),  # falsified by the attack
    (0.875, 1.0, 0),  # unknown: robust, but interval bounds cannot see it
    (0.125, 0.25, 1),  # verified
    (0.4375, 1.0, 1),  # falsified by the attack
    (0.75, 1.0, 1),  # falsified: wrong from the start
    (0.25, 1.0, 1),  # unknown
    (0.53125, 0.0, 0),  # falsified by the attack
    (0.0, 0.125, 1),  # verified
]


def architecture(layers: Sequence[Layer]) -> nets.Architecture:
    """Return the `mlp` that has these layers; hidden ones have the same width."""
    widths = {len(bias) for _, bias in layers[:-1]}
    assert len(widths) == 1
    arguments = {"width": widths.pop(), "depth": len(layers) - 1, "batch_norm": False}
    return nets.Architecture("mlp", (len(layers[0][0][0]),), len(layers[-1][1]), None, arguments)


def network(*layers: Layer) -> nn.Sequential:
    """Return an `mlp` with these weights and biases, exactly representable in float32."""
    module = architecture(layers).build().eval()
    linear = [m for m in module if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for target, (weight, bias) in zip(linear, layers, strict=True):
            for parameter, values in ((target.weight, weight), (target.bias, bias)):
                exact = torch.tensor(values, dtype=torch.float64)
                parameter.copy_(exact)
                assert torch.equal(parameter.double(), exact) or not exact.isfinite().all()
    return module


def rational(module: nn.Sequential, point: Iterable[Fraction | float]) -> list[Fraction]:
    """Return the outputs at a point, without any rounding."""
    values = [Fraction(v) for v in point]
    for layer in module:
        if isinstance(layer, nn.Linear):
            bias = layer.bias.tolist()
            values = [
                sum((Fraction(w) * v for w, v in zip(row, values, strict=True)), Fraction(b))
                for row, b in zip(layer.weight.tolist(), bias, strict=True)
            ]
        elif isinstance(layer, nn.ReLU):
            values = [max(Fraction(0), v) for v in values]
        else:
            assert isinstance(layer, nn.Flatten)
    return values


def rational_margin(
    module: nn.Sequential, point: Iterable[Fraction | float], label: int
) -> Fraction:
    """Return the exact `o_y - max_i o_i` at a point."""
    outputs = rational(module, point)
    return outputs[label] - max(o for i, o in enumerate(outputs) if i != label)


def records(
    module: nn.Module,
    x: Tensor,
    labels: Sequence[int],
    eps: Fraction | str,
    stages: tuple[str, ...] = ("ibp", "attack"),
    points: dict[int, Tensor] | None = None,
    timeout: float = 60.0,
) -> list[Record]:
    """Decide samples and return their records by index; counterexamples go into `points`."""
    found = {} if points is None else points

    def keep(index: int, point: Tensor) -> str:
        found[index] = point
        return f"{index}.npy"

    decided = decide(
        Subject.of(module, tuple(x.shape[1:])),
        Samples(torch.arange(len(x)), x, torch.tensor(labels), Fraction(eps)),
        stages={name: STAGES[name] for name in stages},
        settings=StageSettings(20, 2, timeout),
        keep=keep,
    )
    return sorted(decided, key=lambda record: record.index)


def verdicts(*arguments: Any, **options: Any) -> list[str]:
    """Return only what was decided."""
    return [str(record.verdict) for record in records(*arguments, **options)]


def write_run(
    folder: Path, module: nn.Sequential, x: np.ndarray, y: Sequence[int], eps: str = "0.1"
) -> Run:
    """Write a run folder whose network is `module` and whose test set is `x`, `y`."""
    linear = [m for m in module if isinstance(m, nn.Linear)]
    arguments = {"width": linear[0].out_features, "depth": len(linear) - 1, "batch_norm": False}
    classes = linear[-1].out_features
    folder.mkdir()
    np.savez(
        folder / "data.npz",
        x_train=np.resize(x, (classes, *x.shape[1:])),
        y_train=np.arange(classes),
        x_test=x,
        y_test=np.array(y),
    )
    given = {"data": str(folder / "data.npz"), "net": "mlp", "eps": eps, "device": "cpu"}
    settings = Settings.parse(given).resolve(normalize=False, network=arguments)
    (folder / "config.toml").write_text(settings.to_toml())
    nets.save(module, nets.Architecture("mlp", x.shape[1:], classes, None, arguments), folder)
    return Run(folder)


def blind_spot() -> nn.Sequential:
    """Return a network of two inputs x and y with `o_0 - o_1 = x - 1/2`.

    It adds `8 relu(y - 1/2)` and takes it away again, which interval bounds cannot know.
    """
    return network(
        ([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], [0.0, -0.5, -0.5]),
        ([[1.0, 8.0, -8.0], [0.0, 0.0, 0.0]], [0.0, 0.5]),
    )


def certifiable_run(folder: Path) -> Run:
    """Write a run of `blind_spot` with ten test samples, certified within milliseconds."""
    x = np.array([sample[:2] for sample in SAMPLES], np.float32)
    return write_run(folder, blind_spot(), x, [sample[2] for sample in SAMPLES])
