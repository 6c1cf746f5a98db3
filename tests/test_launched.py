"""What torchrun tells a process about itself."""

import click
import pytest

from tightrope.errors import UserError
from tightrope.launched import Place, is_first, place, speaks

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SECOND = {**MEETING, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),
        ({**SECOND, "RANK": "0", "WORLD_SIZE": "1"}, None),
        (SECOND, Place(1, 4, 1)),
        ({**MEETING, "RANK": "2", "WORLD_SIZE": "4"}, Place(2, 4, 0)),
    ],
)
def test_a_process_knows_its_place(environment: dict[str, str], expected: Place | None) -> None:
    assert place(environment) == expected
    assert is_first(environment) == (expected is None)


@pytest.mark.parametrize("wrong", [{"RANK": "x"}, {"RANK": "4"}, {"WORLD_SIZE": "-1"}])
def test_places_that_cannot_be_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError, match="torchrun sets"):
        place({**SECOND, **wrong})


def test_one_process_of_each_machine_speaks_until_they_agree() -> None:
    error = UserError("no")
    assert speaks(error, {}) and not speaks(error, SECOND)
    assert speaks(error, {**SECOND, "LOCAL_RANK": "0"})
    error.told_here = True
    assert speaks(error, SECOND)
    error.told_here = False
    assert not speaks(error, {**SECOND, "LOCAL_RANK": "0"})


def test_who_tells_of_ctrl_c_is_agreed_upon_before_click_renames_it() -> None:
    interrupt, renamed = KeyboardInterrupt(), click.Abort()
    interrupt.told_here = True  # type: ignore[attr-defined]
    renamed.__cause__ = interrupt
    assert speaks(renamed, SECOND)
    interrupt.told_here = False  # type: ignore[attr-defined]
    assert not speaks(renamed, {**SECOND, "LOCAL_RANK": "0"})
