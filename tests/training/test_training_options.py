"""Every option of every method refuses nonsense, in one line and before anything runs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import tightrope as tr
from tightrope.errors import UserError
from tightrope.training.objectives import METHODS
from tightrope.training.settings import Settings

OPTIONS = {
    name: [f"{method.section}.{field.name}" for field in dataclasses.fields(method)]
    for name, method in METHODS.items()
}
NONSENSE: list[Any] = ["x", "", -1, "-1", math.nan, "nan", -math.inf, [0.5, "y"]]
SMALL: dict[str, Any] = {"train_samples": 64, "validation": 16, "epochs": 1, "device": "cpu"}


@pytest.mark.parametrize("method", OPTIONS)
def test_nonsense_is_refused_by_name(method: str) -> None:
    for option in OPTIONS[method]:
        for value in NONSENSE:
            with pytest.raises(UserError) as caught:
                Settings.parse({"method": method, option: value})
            message = str(caught.value)
            assert message.startswith(f"{option} must ") and "\n" not in message


@pytest.mark.parametrize("method", [name for name, options in OPTIONS.items() if options])
def test_it_is_refused_before_anything_is_written(method: str, tmp_path: Path) -> None:
    section, _, option = OPTIONS[method][0].partition(".")
    with pytest.raises(UserError, match=f"^{section}.{option} must "):
        tr.train(out=tmp_path / "run", method=method, eps=0.1, **{section: {option: "x"}}, **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"smoothing": "rgs", "method": "sortnet"}, "sortnet"),
        ({"sam_rho": 0.1, "method": "sortnet"}, "sortnet"),
        ({"edac_weight": 0.1, "method": "sortnet"}, "edac_weight"),
        ({"tightness_weight": 0.1, "method": "sortnet"}, "tightness_weight"),
        ({"smoothing": "pgpe", "method": "colt"}, "colt"),
        ({"sam_rho": 0.1, "method": "colt"}, "colt"),
        ({"edac_weight": 0.1, "method": "colt"}, "colt"),
        ({"tightness_weight": 0.1, "method": "colt"}, "colt"),
        ({"regularizer_weight": 0.5, "method": "colt"}, "colt"),
    ],
)
def test_helpers_and_methods_that_do_not_go_together(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    net = {"net": "sortnet", "width": 8, "depth": 3} if given["method"] == "sortnet" else {}
    with pytest.raises(UserError, match=message) as caught:
        tr.train(out=tmp_path / "run", eps=0.1, **net, **given, **SMALL)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
