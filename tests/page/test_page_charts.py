"""Ticks, bins and numbers of the charts."""

from __future__ import annotations

import base64
import io
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tightrope.page.axes import Scale, path, ticks, widen
from tightrope.page.content import Certificate, Contents
from tightrope.page.margins import bin_edges, count_bins
from tightrope.page.numbers import count, duration, percent, significant
from tightrope.page.overview import radius_value
from tightrope.page.pictures import is_picture, picture, signed_picture
from tightrope.page.tradeoff import LETTER, LINE, draw_tradeoff

values = st.floats(-1e6, 1e6).map(lambda v: round(v, 4))


@given(values, values, st.integers(2, 12))
def test_ticks_are_inside_and_neither_few_nor_many(a: float, b: float, wanted: int) -> None:
    low, high = min(a, b), max(a, b)
    if high - low < 1e-3:
        high = low + 1.0
    found = ticks(low, high, wanted)
    assert found == sorted(set(found))
    room = 1e-6 * (high - low)
    assert all(low - room <= tick <= high + room for tick in found)
    assert wanted / 3 - 1 <= len(found) <= wanted + 2


def test_ticks_are_round() -> None:
    assert ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0, 70, 6) == [0, 20, 40, 60]
    assert ticks(0.83, 0.91) == [0.84, 0.86, 0.88, 0.9]


@given(values, values, values)
def test_a_scale_keeps_order_and_ends(a: float, b: float, c: float) -> None:
    low, high = widen(min(a, b), max(a, b))
    scale = Scale(low, high, 10, 200)
    assert scale(low) == pytest.approx(10, abs=1e-3) and scale(high) == pytest.approx(200, abs=1e-3)
    inside = min(max(c, low), high)
    assert 10 - 1e-3 <= scale(inside) <= 200 + 1e-3


def test_a_logarithmic_scale() -> None:
    scale = Scale(0.01, 100, 0, 4, logarithmic=True)
    assert [round(scale(v), 9) for v in (0.01, 1, 100)] == [0, 2, 4]
    assert scale.ticks() == [0.01, 0.1, 1.0, 10.0, 100.0]


def test_a_gap_breaks_a_line_and_a_lone_point_is_a_dot() -> None:
    drawn = path([(0.0, 0.0), (1.0, 1.0), None, (2.0, 2.0), None, (3.0, 3.0), (4.0, 4.0)], "a")
    assert drawn.count("M") == 2 and drawn.count("<circle") == 1
    assert path([], "a") == ""


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300))
def test_bins_hold_every_margin_and_zero_is_an_edge(margins: list[float]) -> None:
    edges = bin_edges(sorted(margins))
    assert 0.0 in edges and 2 <= len(edges) <= 140
    assert sum(count_bins(margins, edges)) == len(margins)
    zero = edges.index(0.0)
    positive = [m for m in margins if m > 0]
    if 0 < zero < len(edges) - 1:
        assert not any(count_bins(positive, edges)[:zero])


def test_margins_of_one_value() -> None:
    for value in (0.0, 0.25, -3.0, 1e-12):
        edges = bin_edges([value])
        assert all(math.isfinite(e) for e in edges)
        assert sum(count_bins([value], edges)) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.0001, "< 1 ms"),
        (0.25, "250 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (99.96, "1 min 40 s"),
        (119.6, "2 min 00 s"),
        (7200, "2.0 h"),
        (864000, "10.0 d"),
        (math.nan, "–"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds).replace("\u202f", " ") == text


def test_numbers() -> None:
    assert percent(0.9877) == "98.77\u202f%" and percent(0.5, 0) == "50\u202f%"
    assert percent(None) == "–"
    assert count(1234567).replace("\u202f", " ") == "1 234 567"
    assert significant(-0.000012345) == "−1.23e−5"
    assert significant(12.3456) == "12.3" and significant(math.inf) == "–"


def pixels(uri: str) -> np.ndarray:
    start = "data:image/png;base64,"
    assert uri.startswith(start)
    with Image.open(io.BytesIO(base64.b64decode(uri[len(start) :]))) as image:
        return np.asarray(image)


def test_pictures_hold_the_pixels() -> None:
    grey = np.array([[[0.0, 0.5], [1.0, 2.0]]])
    assert pixels(picture(grey)).tolist() == [[0, 128], [255, 255]]
    colors = np.arange(12).reshape(3, 2, 2) / 255
    assert pixels(picture(colors)).tolist() == [[[0, 4, 8], [1, 5, 9]], [[2, 6, 10], [3, 7, 11]]]


def test_changes_are_signed_and_amplified() -> None:
    change = np.array([[[-0.1, 0.0], [0.05, 0.2]]])
    [[darker, none], [half, lighter]] = pixels(signed_picture(change, 0.1)).astype(int)
    assert darker[2] > darker[0] + 100 and lighter[0] > lighter[2] + 100
    assert np.ptp(none) < 5 and none.min() > 230
    assert lighter.tolist() != half.tolist() and half[0] > half[2]
    colors = np.stack([np.full((1, 1), v) for v in (-0.1, 0.0, 0.1)])
    assert pixels(signed_picture(colors, 0.1)).tolist() == [[[0, 128, 255]]]
    assert pixels(signed_picture(np.zeros((1, 1, 1)), 0.0)).min() > 230


def test_only_images_are_pictures() -> None:
    shapes = [(1, 2, 2), (3, 4, 5), (2, 2, 2), (4,), (1, 0, 2)]
    assert [is_picture(shape) for shape in shapes] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", 0.1), ("8/255", 8 / 255), ("1/0", None), ("x", None), (None, None), ("", None)],
)
def test_radii(text: str | None, value: float | None) -> None:
    assert radius_value(text) == value


@pytest.mark.parametrize("runs", [1, 4, 8, 12])
def test_labels_of_equal_runs_do_not_cover_each_other(runs: int) -> None:
    made = Certificate(100, 90, 5, 5, 0, 0.97, 0.95, 0.9, 1.0, "0.1")
    drawn = draw_tradeoff([Contents(f"run-{i}", "", certificate=made) for i in range(runs)])
    found = re.findall(
        r'<text x="([-.\d]+)" y="([-.\d]+)" class="point-name( end)?">(.*?)<', str(drawn)
    )
    assert len(found) == runs
    boxes = []
    for x, y, end, label in found:
        width = len(label) * LETTER
        boxes.append((float(x) - (width if end else 0), float(y), width))
    for i, (left, y, width) in enumerate(boxes):
        for other, below, wide in boxes[:i]:
            apart = left >= other + wide or other >= left + width
            assert apart or abs(y - below) >= LINE - 1
