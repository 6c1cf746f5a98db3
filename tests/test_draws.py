"""Random numbers of a batch, of which a process has some rows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tightrope.attacks.kernels import chain_attack
from tightrope.box import Box, spread
from tightrope.draws import Rows, drawn_for, own_rows, uniform_like

SHARES = [Rows(0, 4, 9), Rows(4, 5, 9), Rows(5, 9, 9), Rows(0, 9, 9)]
LAYOUTS = {
    "rows": lambda n: torch.zeros(n, 5),
    "numbers": lambda n: torch.zeros(n, dtype=torch.float64),
    "images": lambda n: torch.zeros(n, 3, 4, 2),
    "channels last": lambda n: torch.zeros(n, 3, 4, 2).to(memory_format=torch.channels_last),
    "one channel": lambda n: torch.zeros(n, 1, 4, 2).to(memory_format=torch.channels_last),
    "estimators": lambda n: spread(
        torch.zeros(n, 3, 4, 2).to(memory_format=torch.channels_last), 6
    ),
}


@pytest.mark.parametrize("rows", SHARES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_has_its_rows_of_the_whole(layout: str, rows: Rows) -> None:
    make = LAYOUTS[layout]
    torch.manual_seed(1)
    whole = torch.rand_like(make(rows.total))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    part = make(rows.last - rows.first)
    with drawn_for(rows):
        drawn = uniform_like(part)
    assert torch.equal(drawn, whole[rows.inside])
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn.stride()[1:] == whole.stride()[1:]


@pytest.mark.parametrize("rows", SHARES, ids=str)
def test_points_of_the_latent_attack_are_rows_of_the_whole(rows: Rows, monkeypatch) -> None:
    monkeypatch.setattr(chain_attack, "STREAMS", 4)  # of two or three samples each
    box = Box(torch.zeros(rows.total, 7), torch.rand(rows.total, 7))
    with ThreadPoolExecutor(2) as pool:
        torch.manual_seed(2)
        whole = chain_attack._draw(box, 3, pool)
        state = torch.get_rng_state()
        torch.manual_seed(2)
        with drawn_for(rows):
            part = chain_attack._draw(box[rows.inside], 3, pool)
    assert torch.equal(part, whole[rows.inside])
    assert torch.equal(torch.get_rng_state(), state)
    assert len(whole.unique()) == whole.numel()


def test_other_numbers_of_rows_are_a_mistake() -> None:
    with drawn_for(Rows(2, 4, 9)), pytest.raises(ValueError, match="3 rows, where there are 2"):
        uniform_like(torch.zeros(3, 5))
    assert own_rows(3) == Rows(0, 3, 3)
    assert uniform_like(torch.zeros(3, 5)).shape == (3, 5)
