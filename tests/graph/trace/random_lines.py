"""The lines of random modules: one function per kind, each of which writes one line or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import random_copies
import random_smooth
import torch
from random_modules import MASKS, Shape, Writer
from torch import Tensor, nn

NUMBERS = (0.5, -3.0, 0.1, 2, -1, 1.0, 16777216.0, 1e-3)


def _image(shape: Shape) -> bool:
    return len(shape) == 3


# --- layers -----------------------------------------------------------------------------------


def _fill(w: Writer, layer: nn.Linear | nn.Conv2d) -> nn.Module:
    fan_in = math.prod(layer.weight.shape[1:])
    layer.weight = nn.Parameter(w.numbers(*layer.weight.shape) / math.sqrt(fan_in))
    if layer.bias is not None:
        layer.bias = nn.Parameter(w.numbers(*layer.bias.shape))
    return layer


def _linear(w: Writer, shape: Shape) -> nn.Module:
    square = w.chance(0.5)
    width = shape[-1] if square else w.integer(1, 5)
    return _fill(w, nn.Linear(shape[-1], width, bias=w.chance(0.7)))


def _conv(w: Writer, shape: Shape) -> nn.Module:
    channels = shape[0]
    kernel, dilation = ((w.integer(1, 3), w.integer(1, 3)) for _ in range(2))
    padding = w.choose(0, 1, (0, 1), (2, 1), "same", "valid")
    stride = 1 if padding == "same" else (w.integer(1, 2), w.integer(1, 2))
    groups = w.choose(1, 1, channels)
    outputs = groups * w.integer(1, 2)
    bias = w.chance(0.7)
    return _fill(w, nn.Conv2d(channels, outputs, kernel, stride, padding, dilation, groups, bias))


def _norm(w: Writer, shape: Shape) -> nn.Module:
    """A BatchNorm with statistics that training does not give."""
    kind = nn.BatchNorm2d if _image(shape) else nn.BatchNorm1d
    affine = w.chance(0.7)
    layer = kind(
        shape[0], eps=w.choose(1e-5, 1e-3, 1e-8), momentum=w.choose(0.1, None), affine=affine
    )
    layer.running_mean = w.numbers(shape[0], magnitudes=(0.0, 1.0, 1e3))
    layer.running_var = w.numbers(shape[0], magnitudes=(0.0, 1.0, 1e-4, 1e4)).abs()
    if affine:
        layer.weight = nn.Parameter(w.numbers(shape[0]))
        layer.bias = nn.Parameter(w.numbers(shape[0]))
    return layer


def _pool_options(w: Writer, shape: Shape) -> dict[str, Any]:
    kernel = tuple(min(size, w.integer(1, 3)) for size in shape[1:])
    padding = tuple(w.integer(0, k // 2) for k in kernel)
    stride = w.choose(None, (w.integer(1, 2), w.integer(1, 2)), w.integer(1, 3))
    options = {"kernel_size": kernel, "stride": stride, "padding": padding}
    return {**options, "ceil_mode": w.chance(0.4)}


def _max_pool(w: Writer, shape: Shape) -> nn.Module:
    return nn.MaxPool2d(**_pool_options(w, shape), dilation=w.choose(1, 1, 2, (1, 2)))


def _avg_pool(w: Writer, shape: Shape) -> nn.Module:
    if w.chance(0.3):
        return nn.AdaptiveAvgPool2d(tuple(w.choose(1, size, None) for size in shape[1:]))
    return nn.AvgPool2d(**_pool_options(w, shape), count_include_pad=w.chance(0.5))


def _activation(w: Writer, shape: Shape) -> nn.Module:
    inplace = w.chance(0.5)
    return w.choose(
        nn.ReLU(inplace), nn.ReLU(inplace), nn.LeakyReLU(w.choose(0.1, 0.0, 2.0), inplace),
        nn.Sigmoid(), nn.Tanh(), nn.Identity(), nn.Dropout(0.5, inplace), nn.Dropout2d(0.5),
    )  # fmt: skip


def _rearranging(w: Writer, shape: Shape) -> nn.Module:
    rank = len(shape)
    pads = tuple(w.integer(0, 2) for _ in range(4))
    return w.choose(
        nn.Flatten(), nn.Flatten(w.integer(1, rank), -1), nn.Flatten(1, w.integer(1, rank)),
        nn.ZeroPad2d(pads), nn.ConstantPad2d(pads, w.choose(0.3, -2.0)),
        nn.Unflatten(1, (shape[0], 1)), nn.Unflatten(-1, (1, -1)),
    )  # fmt: skip


_LAYERS: tuple[tuple[Callable[..., nn.Module], Callable[[Shape], bool], int], ...] = (
    (_linear, lambda shape: len(shape) >= 1, 5),
    (_conv, _image, 5),
    (_norm, lambda shape: len(shape) in (1, 2, 3), 3),
    (_max_pool, _image, 3),
    (_avg_pool, _image, 3),
    (_activation, lambda shape: True, 5),
    (_rearranging, lambda shape: len(shape) >= 1, 2),
    (random_copies.transposed, lambda shape: _image(shape) or len(shape) == 2, 4),
    (random_copies.of_lines, lambda shape: len(shape) == 2, 3),
    (random_copies.bends, lambda shape: len(shape) >= 1, 2),
)


def layer(w: Writer) -> None:
    """Apply a layer; sometimes one that is there already, or one in a container, or hooked."""
    if w.chance(0.15) and w.layers():
        w.assign(f"{w.choose(*w.layers())}({w.pick()})")
        return
    name = w.pick(_image if w.chance(0.4) else lambda shape: True)
    if name is None:
        return
    shape = w.shape(name)
    fitting = [(make, weight) for make, fits, weight in _LAYERS if fits(shape)]
    makers, weights = zip(*fitting, strict=True)
    (make,) = w.random.choices(makers, weights)
    made = make(w, shape)
    if w.chance(0.2):
        made = nn.Sequential(made, nn.ReLU(inplace=w.chance(0.5)), nn.Dropout())
    held = w.hold(made)
    if w.chance(0.2):
        _hook(w, w.choose(made, *made.children()), held)
    if not w.assign(f"{held}({name})"):
        delattr(w.module, held.removeprefix("self."))


def _hook(w: Writer, target: nn.Module, held: str) -> None:
    number = w.choose(*NUMBERS)
    before, text = w.choose(
        (False, "output * number"), (False, "output + number"), (False, "output.relu_()"),
        (False, "output.mul_(number) and None"), (False, "None"), (False, "number - output"),
        (True, "args[0] * number"), (True, "(args[0] - number,)"), (True, "args[0].add_(number)"),
        (True, "None"),
    )  # fmt: skip
    text = text.replace("output.mul_(number) and None", "(output.mul_(number), None)[1]")
    scope = {"number": number}
    target.to(w.dtype).eval()
    if before:
        target.register_forward_pre_hook(eval(f"lambda module, args: {text}", scope))
    else:
        target.register_forward_hook(eval(f"lambda module, args, output: {text}", scope))
    w.note(f"{'pre-' if before else ''}hook of {held} ({type(target).__name__}): {text}, {number=}")


def hook_all(w: Writer) -> None:
    """Sometimes hook the module itself."""
    if w.chance(0.1):
        _hook(w, w.module, "self")


# --- functions and constants ------------------------------------------------------------------


def _constant(w: Writer, shape: Shape, *, divisor: bool = False) -> str:
    """Return how to write a constant that fits a sample: a number, buffer, parameter, tensor."""
    if w.chance(0.35):
        return repr(w.choose(*NUMBERS))
    per_channel = (*shape[:1], *(1 for _ in shape[1:]))
    size = w.choose((), per_channel, shape[-1:], shape, (1, *shape))
    values = w.numbers(*size)
    if divisor:
        values = torch.where(values.abs() < 1e-3, torch.full_like(values, 0.7), values)
    how = w.choose("buffer", "buffer", "parameter", "attribute", "integers", "inside")
    if how == "parameter":
        return w.hold(nn.Parameter(values))
    if how in ("integers", "inside"):
        numbers = torch.randint(1, 9, size, generator=w.generator)
        return f"torch.tensor({(numbers if how == 'integers' else numbers / 4).tolist()})"
    held = w.hold(values, how)
    return w.choose(held, held, f"(-{held})", f"({held}.clone() * 2)")


def arithmetic(w: Writer) -> None:
    name = w.pick()
    shape = w.shape(name)
    constant, divisor = _constant(w, shape), _constant(w, shape, divisor=True)
    expression = w.choose(
        f"{name} + {constant}",
        f"{constant} + {name}",
        f"{name} - {constant}",
        f"{constant} - {name}",
        f"{name} * {constant}",
        f"{constant} * {name}",
        f"{name} / {divisor}",
        f"-{name}",
        f"torch.sub({name}, {constant})",
        f"torch.rsub({name}, {w.choose(*NUMBERS)})",
        f"torch.neg({name}.mul({constant}))",
    )
    w.assign(expression)


def merge(w: Writer) -> None:
    name = w.pick()
    other = w.partner(name)
    dims = len(w.shape(name))
    expression = w.choose(
        f"{name} + {other}",
        f"{name} - {other}",
        f"torch.add({name}, {other})",
        f"torch.cat(({name}, {other}), {w.integer(1, max(dims, 1))})",
        f"torch.concat([{name}, {other}, {name}], dim=-1)" if dims else f"{other} - {name}",
    )
    w.assign(expression)


def function(w: Writer) -> None:
    """Functions of `torch.nn.functional` and methods, with their own parameters."""
    name = w.pick(_image if w.chance(0.5) else lambda shape: True)
    if name is None:
        return
    shape = w.shape(name)
    choices = [
        f"F.relu({name})", f"{name}.relu()", f"torch.sigmoid({name})", f"{name}.tanh()",
        f"F.leaky_relu({name}, {w.choose(0.2, 1.5)})", f"{name}.clone()", f"{name}.detach()",
        f"{name}.contiguous()", f"{name}.to(v0.dtype)", f"F.dropout({name}, 0.5, self.training)",
        f"F.dropout({name}, 0.5, False)",
    ]  # fmt: skip
    if _image(shape):
        kernel = min(*shape[1:], 2)
        choices += [
            f"{name}.mean((2, 3))", f"torch.mean({name}, dim=[-1, -2], keepdim=True)",
            f"F.max_pool2d({name}, {kernel}, 1)", f"F.avg_pool2d({name}, {kernel}, padding=0)",
            f"F.adaptive_avg_pool2d({name}, 1)",
            f"F.conv2d({name}, {_weight(w, 2, shape[0], 1, kernel)}, padding=1)",
        ]  # fmt: skip
    if shape:
        choices += random_copies.calls(w, name, shape)
        choices.append(f"F.linear({name}, {_weight(w, 3, shape[-1])}, {_weight(w, 3)})")
    if len(shape) in (1, 2, 3):
        mean, variance = (w.hold(w.numbers(shape[0]).abs(), "buffer") for _ in range(2))
        choices.append(f"F.batch_norm({name}, {mean}, {variance}, {_weight(w, shape[0])})")
    w.assign(w.choose(*choices))


def _weight(w: Writer, *shape: int) -> str:
    values = w.numbers(*shape)
    return w.hold(nn.Parameter(values)) if w.chance(0.7) else w.hold(values, "buffer")


# --- views ------------------------------------------------------------------------------------


def _view(w: Writer, name: str) -> str:
    """Return a view of all of a value."""
    shape = w.shape(name)
    rank = len(shape)
    size = math.prod(shape)
    divisor = w.choose(*[d for d in range(1, size + 1) if size % d == 0])
    order = w.random.sample(range(1, rank + 1), rank)
    return w.choose(
        f"{name}.view(len({name}), -1)", f"{name}.reshape(-1, {divisor}, {size // divisor})",
        f"{name}.view(-1, {divisor}, {size // divisor})", f"{name}.flatten(1)",
        f"{name}.unsqueeze({w.integer(1, rank + 1)})", f"{name}.permute(0, {str(order)[1:-1]})",
        f"{name}.transpose({w.integer(1, max(rank, 1))}, -1)",
        f"{name}.squeeze({w.integer(1, max(rank, 1))})",
        f"{name}.unflatten(1, ({shape[0] if shape else 1}, 1))", f"{name}[:, None]",
        f"{name}.movedim(1, -1)",
    )  # fmt: skip


def _part(w: Writer, name: str) -> str:
    """Return a part of a value."""
    index: list[str] = []
    for size in w.shape(name):
        start = w.integer(0, size - 1)
        stop = w.integer(start + 1, size)
        step = w.choose("", "", ":2")
        whole, one = ":", str(w.integer(-size, size - 1))
        index.append(w.choose(whole, whole, f"{start}:{stop}{step}", f"{start}:{stop}", one))
    return f"{name}[{', '.join([':', *index])}]"


def view(w: Writer) -> None:
    name = w.pick()
    w.assign(_view(w, name) if w.chance(0.6) else _part(w, name))


def pad(w: Writer) -> None:
    name = w.pick(lambda shape: len(shape) >= 1)
    if name is not None:
        pads = [w.integer(-1, 2) for _ in range(2 * w.integer(1, len(w.shape(name))))]
        w.assign(f"F.pad({name}, {pads}, value={w.choose(0.0, -2.0, 0.1)})")


# --- changes in place -------------------------------------------------------------------------


def change(w: Writer) -> None:
    """Change a value in place, also through a view, whoever else reads it."""
    name = w.pick()
    target = _view(w, name) if w.chance(0.3) else name
    if w.chance(0.04):
        target = _part(w, name)
    number = w.choose(*NUMBERS)
    constant, divisor = (_constant(w, w.shape(name), divisor=d) for d in (False, True))
    other = w.partner(name)
    lines = [
        f"{target}.relu_()", f"{target}.mul_({number})", f"{target}.add_({number})",
        f"{target}.neg_()", f"{target}.tanh_()", f"{target}.sigmoid_()", f"torch.relu_({target})",
        f"F.leaky_relu_({target}, 0.3)", f"F.relu({target}, inplace=True)",
        f"{target}.detach().mul_({number})", f"{target}.sub_({number})",
    ]  # fmt: skip
    if target == name:
        lines += [
            f"{name} += {other}", f"{name} -= {other}", f"{name}.add_({other})",
            f"{name} += {constant}", f"{name} *= {constant}", f"{name} /= {divisor}",
            f"{name}.sub_({constant})", f"torch.add({name}, {other}, out={name})",
        ]  # fmt: skip
    w.run(w.choose(*lines))


# --- what is not supported --------------------------------------------------------------------


def unsupported(w: Writer) -> None:
    name = w.pick()
    other = w.partner(name)
    expression = w.choose(
        f"torch.add({name}, {other}, alpha=2)",
        f"{name} - {name}.mean(0)",
        f"{name} + {name}[:1]",
        f"torch.cumsum({name}, -1)",
        f"{name}.sort(-1)[0]",
        f"{name} ** {other}",
        f"torch.atan2({name}, {other})",
    )
    w.assign(expression)


KINDS: tuple[tuple[Callable[[Writer], None], int], ...] = (
    (layer, 12),
    (arithmetic, 4),
    (merge, 4),
    (function, 4),
    (random_smooth.smooth, 4),
    (view, 4),
    (pad, 1),
    (change, 4),
)
UNSUPPORTED = 0.05


def join(w: Writer) -> None:
    """Let the output depend on several values."""
    if w.chance(UNSUPPORTED):
        unsupported(w)
    name = w.names[-1]
    for other in w.names[:-1]:
        if w.chance(0.2) and w.shape(other) == w.shape(name):
            w.assign(f"{w.names[-1]} - {other}")


def mask(w: Writer) -> None:
    """Put outputs of 1e9 beside the others, in one of several ways."""
    name = w.names[-1]
    shape = w.shape(name)
    if w.chance(0.6):
        values = torch.zeros(shape, dtype=w.dtype)
        values.flatten()[w.integer(0, values.numel() - 1)] = w.choose(*MASKS)
        held = w.hold(values, "buffer")
        w.assign(w.choose(f"{name} + {held}", f"{name} - {held}", f"{held} + {name}"))
    elif len(shape) == 1 and w.chance(0.5):
        layer = _fill(w, nn.Linear(shape[0], 3))
        assert isinstance(layer.bias, Tensor)
        layer.bias.data[0] = w.choose(*MASKS)
        w.assign(f"{w.hold(layer)}({name})")
