"""Random ONNX models over the operators, attributes and versions that the reader knows.

Each operator is tried with onnxruntime on the spot, so that shapes come from there and what
onnxruntime itself refuses is left out; everything else is up to chance, what the reader refuses
included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper, numpy_helper
from onnx_sketch import MASK, Sketch


class RandomModel(Sketch):
    """A model of random operators."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for _ in range(int(self.random.integers(2, 9))):
            self.step()
        if self.chance(0.5):
            self.mask()

    def step(self) -> None:
        steps = [
            *(self.activate, self.bend, self.calculate, self.calculate, self.join, self.layer),
            *(self.layer, self.multiply, self.pool, self.pool, self.normalise, self.reshape),
            *(self.turn, self.cut, self.choose_elements, self.pad, self.reduce, self.reduce),
            *(self.reshape_by_shapes, self.compute_constants, self.clip, self.drop),
        ]
        if not self.now:  # a number
            steps = [self.activate, self.bend, self.calculate, self.clip, self.drop, self.widen]
        self.choose(steps)()
        if self.chance(0.05):
            self.mask()
        if self.chance(0.01):
            self.go("Det", self.last)

    def mask(self) -> None:
        """Add a huge number to one element."""
        array = np.zeros(self.now, self.dtype)
        array.reshape(-1)[self.integer(0, array.size - 1)] = self.choose([MASK, -MASK])
        before = self.last
        self.go("Add", self.last, self.constant(array))
        self.masked = self.masked or self.last != before

    # --- operators ------------------------------------------------------------------------

    def activate(self) -> None:
        self.go(
            self.choose(["Relu", "Relu", "Relu", "Sigmoid", "Tanh", "Neg", "Identity"]), self.last
        )

    def bend(self) -> None:
        if self.chance(0.5):
            slope = self.choose([0.0, 0.1, 0.01, 1.0, 2.5, -0.5])
            self.go("LeakyRelu", self.last, **self.optional(alpha=slope))
        else:
            slope = self.choose([0.25, 0.0, 2.0])
            shape = self.choose(
                [(1,), self.now, (1,) * len(self.now), self.now[-1:], (3, *self.now)]
            )
            array = np.full(shape, slope, self.dtype)
            if self.chance(0.2):
                array = self.random.uniform(0, 1, shape).astype(self.dtype)
            self.go("PRelu", self.last, self.constant(array))

    def clip(self) -> None:
        low, high = self.choose([(-0.5, 0.5), (0.0, 6.0), (0.7, -0.2), (-1e30, 0.5)])
        if self.opset < 11:
            self.go("Clip", self.last, **self.optional(min=low, max=high))
            return
        names = [self.constant(self.dtype.type(number)) for number in (low, high)]
        self.go("Clip", self.last, *self.choose([names, names[:1], ["", names[1]]]))

    def drop(self) -> None:
        extra = f"mask{len(self.nodes)}" if self.chance(0.3) else ""
        if self.opset < 12:
            self.go("Dropout", self.last, extra=extra, **self.optional(ratio=0.3))
        else:
            rest = self.choose(
                [[], [self.constant(np.float32(0.3))], ["", self.constant(np.array(False))]]
            )
            self.go("Dropout", self.last, *rest, extra=extra)

    def broadcastable(self) -> str:
        """Return a constant that can be combined with the last value, or nearly so."""
        shape = [self.choose([size, size, 1]) for size in self.now]
        shape = shape[self.integer(0, len(shape)) :]
        if self.chance(0.1):
            shape = [*self.integers(1, 2, 2), *shape]
        if self.chance(0.05) and shape:
            shape[self.integer(0, len(shape) - 1)] = 3
        return self.floats(*shape)

    def calculate(self) -> None:
        kind = self.choose(["Add", "Sub", "Mul", "Div", "Max", "Min"])
        inputs = [self.last, self.broadcastable()]
        if kind in ("Max", "Min") and self.chance(0.3):
            inputs = self.choose([inputs[:1], [*inputs, self.broadcastable()]])
        self.random.shuffle(inputs)
        self.go(kind, *inputs)

    def join(self) -> None:
        values = [name for name, array in self.sample.items() if array.dtype == self.dtype]
        other = self.choose(values)
        kind = self.choose(["Add", "Sub", "Concat", "Concat", "Mul"])
        if kind == "Concat":
            rank = len(self.now)
            count = self.integer(1, 3)
            fitting = [v for v in values if len(self.sample[v].shape) == rank] or [self.last]
            inputs = [
                self.last,
                *(self.choose([self.last, self.choose(fitting)]) for _ in range(count - 1)),
            ]
            self.go(kind, *inputs, axis=self.integer(-rank, rank - 1))
        else:
            pair = [self.last, other]
            self.random.shuffle(pair)
            self.go(kind, *pair)

    def image(self) -> bool:
        """Make the last value an image, if that is possible."""
        if len(self.now) == 4 and self.now[0] == 1:
            return True
        total = int(np.prod(self.now))
        sides = [s for s in range(2, 8) if total % s == 0 and total // s > 1]
        if sides and self.chance(0.5):
            self.go(
                "Reshape", self.last, self.sizes(1, self.choose([1, -1]), self.choose(sides), -1)
            )
            return len(self.now) == 4
        return False

    def windows(self, kernel: list[int]) -> dict[str, Any]:
        """Return random positions of windows."""
        found = self.optional(strides=self.integers(1, 3, 2))
        dilatable = self.opset >= 10
        if dilatable and self.chance(0.3):
            found["dilations"] = self.integers(1, 2, 2)
        kind = self.integer(0, 5)
        if kind == 1:
            low = [self.integer(0, max(0, k - 1)) for k in kernel]
            found["pads"] = low + low
        elif kind == 2:
            found["pads"] = [self.integer(0, max(0, k - 1)) for k in kernel + kernel]
        elif kind == 3:
            found["auto_pad"] = self.choose(["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
        elif kind == 4:
            found["pads"] = [1, 1, 1, 1]
        return found

    def layer(self) -> None:
        if not self.image():
            self.dense()
            return
        channels = self.now[1]
        group = self.choose([g for g in (1, 1, 1, 2, channels) if channels % g == 0])
        kernel = self.integers(1, 3, 2)
        outputs = group * self.integer(1, 2)
        weight = self.floats(outputs, channels // group, *kernel)
        rest = [self.bias(outputs)] if self.chance(0.5) else []
        attributes = self.windows(kernel) | self.optional(kernel_shape=kernel)
        if group > 1:
            attributes["group"] = group
        self.go("Conv", self.last, weight, *rest, **attributes)

    def bias(self, *shape: int) -> str:
        array = self.random.normal(size=shape).astype(self.dtype)
        if self.chance(0.2) and array.size:
            array.reshape(-1)[self.integer(0, array.size - 1)] = self.choose([MASK, -MASK])
            self.masked = True
        return self.constant(array)

    def dense(self) -> None:
        if len(self.now) != 2:
            return
        rows, features = self.now
        width = self.integer(1, 5)
        attributes = self.optional(
            alpha=self.choose([0.5, 1.0, 0.3]), beta=self.choose([2.0, 1.0, 0.0, 0.3])
        )
        turned = {name: 1 for name in ("transA", "transB") if self.chance(0.4)}
        inner = rows if "transA" in turned else features
        outer = features if "transA" in turned else rows
        weight = self.floats(*((width, inner) if "transB" in turned else (inner, width)))
        shape = self.choose([(width,), (1, width), (outer, width), (1,), (), (outer, 1)])
        needed = self.opset < 11
        rest = [self.bias(*shape)] if needed or self.chance(0.7) else []
        self.go("Gemm", self.last, weight, *rest, **attributes, **turned)

    def multiply(self) -> None:
        shape, width = self.now, self.integer(1, 4)
        if len(shape) > 1 and self.chance(0.5):
            left = self.choose([(width, shape[-2]), (shape[-2],), (1, width, shape[-2])])
            self.go("MatMul", self.floats(*left), self.last)
        else:
            right = self.choose([(shape[-1], width), (shape[-1],), (1, shape[-1], width)])
            self.go("MatMul", self.last, self.floats(*right))

    def pool(self) -> None:
        if not self.image():
            return
        kind = self.choose(
            ["MaxPool", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"]
        )
        if kind.startswith("Global"):
            self.go(kind, self.last)
            return
        if self.chance(0.3):
            self.go("Relu", self.last)
        kernel = self.integers(1, 3, 2)
        attributes = self.windows(kernel)
        if self.opset >= 10:
            attributes |= self.optional(ceil_mode=self.integer(0, 1))
        if kind == "AveragePool":
            attributes |= self.optional(count_include_pad=self.integer(0, 1))
            if self.opset < 19:
                attributes.pop("dilations", None)
        extra = f"indices{len(self.nodes)}" if kind == "MaxPool" and self.chance(0.1) else ""
        self.go(kind, self.last, extra=extra, kernel_shape=kernel, **attributes)

    def normalise(self) -> None:
        if len(self.now) < 2:
            return
        channels = self.now[1]
        arrays = [self.floats(channels) for _ in range(3)]
        variance = self.constant(self.random.uniform(0.1, 2.0, channels).astype(self.dtype))
        attributes = self.optional(epsilon=self.choose([1e-5, 0.1]), momentum=0.9)
        self.go("BatchNormalization", self.last, *arrays, variance, **attributes)

    def reshape(self) -> None:
        total = int(np.prod(self.now))
        kind = self.choose(["Reshape", "Reshape", "Flatten", "Squeeze", "Unsqueeze"])
        if kind == "Reshape":
            first = self.choose([d for d in range(1, total + 1) if total % d == 0])
            shapes = [
                (first, total // first),
                (1, first, -1),
                (-1,),
                (0, -1),
                (1, -1, first),
                (total, 1),
            ]
            attributes = {"allowzero": 1} if self.opset >= 14 and self.chance(0.2) else {}
            self.go(kind, self.last, self.sizes(*self.choose(shapes)), **attributes)
        elif kind == "Flatten":
            low = 0 if self.opset < 11 else -len(self.now)
            self.go(kind, self.last, **self.optional(axis=self.integer(low, len(self.now))))
        else:
            self.squeeze(kind)

    def squeeze(self, kind: str) -> None:
        rank = len(self.now)
        if kind == "Unsqueeze":
            axes = sorted({self.integer(0, rank) for _ in range(self.integer(1, 2))})
            if self.opset >= 11 and self.chance(0.3):
                axes = [-1]
        else:
            axes = [i for i, size in enumerate(self.now) if size == 1 and self.chance(0.7)]
            if self.chance(0.2):
                self.go(kind, self.last)
                return
        if self.opset < 13:
            self.go(kind, self.last, **({"axes": axes} if axes else {}))
        else:
            self.go(kind, self.last, self.sizes(*axes))

    def widen(self) -> None:
        self.squeeze("Unsqueeze")

    def turn(self) -> None:
        order = [int(i) for i in self.random.permutation(len(self.now))]
        self.go("Transpose", self.last, **self.optional(perm=order))

    def cut(self) -> None:
        rank = len(self.now)
        axes = sorted({self.integer(0, rank - 1) for _ in range(self.integer(1, 2))})
        starts = [self.choose([0, 1, -1, -2, -100]) for _ in axes]
        ends = [self.choose([self.now[a], -1, 2, 2**31 - 1, 2**62]) for a in axes]
        if self.opset < 10:
            self.go("Slice", self.last, starts=starts, ends=ends, **self.optional(axes=axes))
            return
        axes = [self.choose([axis, axis - rank]) for axis in axes]
        steps = [self.choose([1, 1, 2, 3, -1]) for _ in axes]
        names = [self.sizes(*numbers) for numbers in (starts, ends, axes, steps)]
        self.go("Slice", self.last, *names[: self.choose([2, 3, 4])])

    def choose_elements(self) -> None:
        axis = self.integer(0, len(self.now) - 1)
        size = self.now[axis]
        index = self.choose(
            [self.integer(0, size - 1), [0], list(range(0, size, 2)), -1, [-1], [1, 0]]
        )
        axis = self.choose([axis, axis - len(self.now)])
        self.go("Gather", self.last, self.constant(np.array(index)), axis=axis)

    def pad(self) -> None:
        rank = len(self.now)
        pads = [self.choose([0, 0, 1, 2]) for _ in range(2 * rank)]
        if self.chance(0.8):
            pads[0] = pads[rank] = 0
        if self.chance(0.1):
            pads[self.integer(0, 2 * rank - 1)] = -1
        fill = self.choose([0.0, 0.5, -1.0])
        if self.opset < 11:
            self.go("Pad", self.last, pads=pads, **self.optional(value=fill))
            return
        rest = [self.constant(self.dtype.type(fill))] if self.chance(0.6) else []
        if self.opset >= 18 and self.chance(0.5):
            axis = self.integer(-rank, rank - 1)
            rest = [*(rest or [""]), self.sizes(axis)]
            pads = [1, 2]
        self.go("Pad", self.last, self.sizes(*pads), *rest)

    def reduce(self) -> None:
        kind = self.choose(["ReduceSum", "ReduceMean"])
        rank = len(self.now)
        axes = sorted({self.integer(0, rank - 1) for _ in range(self.integer(1, 2))})
        if self.opset >= 11 and self.chance(0.3):
            axes = [axis - rank for axis in axes]
        attributes = self.optional(keepdims=self.integer(0, 1))
        by_input = self.opset >= (13 if kind == "ReduceSum" else 18)
        if not by_input:
            self.go(kind, self.last, **attributes, **self.optional(axes=axes))
            return
        attributes |= self.optional(noop_with_empty_axes=self.integer(0, 1))
        rest = self.choose([[self.sizes(*axes)], [self.sizes(*axes)], [], [self.sizes()]])
        self.go(kind, self.last, *rest, **attributes)

    # --- constants ------------------------------------------------------------------------

    def reshape_by_shapes(self) -> None:
        """Compute the shape as exporters do: from the shape of the value."""
        if self.opset < 13 or len(self.now) < 2:
            return
        attributes = self.optional(start=0) if self.opset >= 15 else {}
        shape = self.apply("Shape", self.last, **attributes)
        part = shape and self.apply("Gather", shape, self.constant(np.array(0)), axis=0)
        part = part and self.apply("Unsqueeze", part, self.sizes(0))
        target = part and self.apply("Concat", part, self.sizes(-1), axis=0)
        if target:
            self.go("Reshape", self.last, target)

    def compute_constants(self) -> None:
        """Combine the last value with a constant that the file computes."""
        kind = self.choose(["filled", "expanded", "range", "scaled", "cast"])
        result: str | None = None
        width = self.now[-1]
        if kind == "filled" and self.opset >= 9:
            fill = numpy_helper.from_array(np.array([0.5], self.dtype))
            result = self.apply("ConstantOfShape", self.sizes(width), value=fill)
        elif kind == "expanded":
            result = self.apply("Expand", self.floats(1), self.sizes(width))
        elif kind == "range" and self.opset >= 11:
            bounds = [self.constant(np.array(i)) for i in (0, width, 1)]
            steps = self.apply("Range", *bounds)
            result = steps and self.apply(
                "Cast", steps, to=helper.np_dtype_to_tensor_dtype(self.dtype)
            )
        elif kind == "scaled":
            result = self.apply(
                self.choose(["Mul", "Add", "Div", "Sub"]), self.floats(width), self.floats(1)
            )
            self.computed_floats = True
        elif kind == "cast":
            halves = self.constant(self.random.normal(size=width).astype(np.float16))
            result = self.apply("Cast", halves, to=helper.np_dtype_to_tensor_dtype(self.dtype))
        if result:
            self.go(self.choose(["Add", "Mul"]), self.last, result)
