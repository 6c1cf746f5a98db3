"""ONNX operators that reduce axes: sums, means, maxima and minima."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tightrope.graph import composed, ops, statistics
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx import windows as onnx_windows
from tightrope.nets.onnx.builder import Builder, Call, Converter, Value

Reduce = Callable[[Builder, int, list[int]], int]


def _reduced(reduce: Reduce) -> Converter:
    def convert(build: Builder, call: Call) -> Value:
        value = call.value()
        rank = len(value.shape)
        axes = call.integers(1, "axes")
        if not axes and call.get("noop_with_empty_axes", 0):
            return value
        chosen = sorted(dimensions.axes_of(axes or range(rank), rank))
        shape = dimensions.reduced(value.shape, chosen, bool(call.get("keepdims", 1)))
        pooled = chosen == [2, 3] and rank == 4 and value.shape[0] == 1
        if call.kind == "ReduceMean" and pooled:
            return onnx_windows.global_average(build, value, shape)
        return build.place(reduce(build, build.at(value, value.shape or (1,)), chosen), shape)

    return convert


def _log_sum(build: Builder, x: int, axes: list[int]) -> int:
    return build.append(ops.Function("log"), composed.summed(build, x, axes))


def _running_sum(build: Builder, call: Call) -> Value:
    value, axes = call.value(), call.integers(1)
    assert axes is not None and len(axes) == 1
    axis = dimensions.axis_of(axes[0], len(value.shape))
    found = statistics.running_sum(
        build,
        build.at(value, value.shape),
        axis,
        exclusive=bool(call.get("exclusive", 0)),
        reverse=bool(call.get("reverse", 0)),
    )
    return build.place(found, value.shape)


def _mean(build: Builder, x: int, axes: list[int]) -> int:
    return composed.summed(build, x, axes, mean=True)


CONVERTERS: dict[str, Converter] = {
    "ReduceSum": _reduced(composed.summed),
    "ReduceMean": _reduced(_mean),
    "ReduceMax": _reduced(composed.largest),
    "ReduceMin": _reduced(composed.smallest),
    "ReduceProd": _reduced(statistics.product),
    "ReduceL1": _reduced(partial(statistics.norm, order=1.0)),
    "ReduceL2": _reduced(statistics.norm),
    "ReduceSumSquare": _reduced(statistics.squares),
    "ReduceLogSum": _reduced(_log_sum),
    "ReduceLogSumExp": _reduced(statistics.log_sum_exp),
    "CumSum": _running_sum,
}
