"""Limits: their defaults, how they are raised, what is said when something exceeds one."""

import pytest

from tightrope import limits
from tightrope.errors import UserError
from tightrope.limits import LIMITS, Limit, check_environment


def test_the_environment_changes_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.ONNX_NODES.value == limits.ONNX_NODES.default
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_NODES", "2_000_000")
    check_environment()
    assert limits.ONNX_NODES.value == 2_000_000
    assert limits.ONNX_BYTES.value == limits.ONNX_BYTES.default


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "0", "1.5", "1e9", "9" * 5000, str(2**63), "١٢"]
)
def test_a_limit_is_a_positive_whole_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTROPE_LIMIT_JSON_BYTES", text)
    with pytest.raises(UserError, match="TIGHTROPE_LIMIT_JSON_BYTES must") as error:
        check_environment()
    assert len(str(error.value)) < 200


def test_a_misspelt_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTROPE_LIMIT_ONNX_NODE", "5")
    with pytest.raises(UserError, match="did you mean 'ONNX_NODES'"):
        check_environment()


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_what_exceeds_a_limit_is_refused_in_one_line_that_says_how_to_raise_it(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limit.check(limit.default, "this") == limit.default
    with pytest.raises(UserError) as error:
        limit.check(limit.default + 1, "this")
    message = str(error.value)
    assert "\n" not in message
    assert f"the limit of {limit.default} {limit.unit}" in message
    assert limit.variable in message
    monkeypatch.setenv(limit.variable, str(limit.default + 1))
    assert limit.check(limit.default + 1, "this") == limit.default + 1
