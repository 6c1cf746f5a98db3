"""Several processes that share every batch train as one process does."""

import pytest
import shared_steps
import torch
from hangs import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[2, 3])
def several(request, tmp_path_factory):
    """What every one of several processes found; their shares of batches are unequal."""
    folder = tmp_path_factory.mktemp(f"processes-{request.param}")
    return shared_steps.by_processes(request.param, folder, PATIENCE)


@pytest.fixture(scope="module")
def alone():
    """What one process finds, computed when it is asked for."""
    found = {}

    def compute(name):
        if name not in found:
            known = name in shared_steps.TRAININGS
            function = shared_steps.training if known else shared_steps.step
            source = shared_steps.TRAININGS if known else shared_steps.cases()
            found[name] = function(source[name], None)
        return found[name]

    return compute


def assert_near(found, expected, tolerance):
    """Compare tensors by name, relative to the largest number in any of them."""
    largest = max(t.abs().max().item() for t in expected.values())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max().item()
        assert error <= tolerance * largest, name


@pytest.mark.parametrize("name", shared_steps.cases())
def test_gradients_are_those_of_one_process(name, several, alone):
    expected = alone(name)
    assert max(g.abs().max() for g in expected["gradients"].values()) > 1e-3
    for process in several:
        found = process["steps"][name]
        assert_near(found["gradients"], expected["gradients"], 1e-9)
        if expected["buffers"]:
            assert_near(found["buffers"], expected["buffers"], 1e-12)
        assert torch.equal(found["random"], expected["random"])


@pytest.mark.parametrize("name", shared_steps.cases())
def test_processes_count_their_own_samples(name, several, alone):
    samples, loss, natural, robust = alone(name)["sums"]
    sums = [process["steps"][name]["sums"] for process in several]
    assert all(0 < s[0] < samples for s in sums)
    assert len({s[0] for s in sums}) > 1  # unequal shares
    assert sum(s[0] for s in sums) == samples
    assert sum(s[1] for s in sums) == pytest.approx(loss, rel=1e-9)
    assert sum(s[2] for s in sums) == natural
    if robust is None:
        assert all(s[3] is None for s in sums)
    else:
        assert sum(s[3] for s in sums) == robust


@pytest.mark.parametrize("name", shared_steps.TRAININGS)
def test_trainings_end_like_those_of_one_process(name, several, alone):
    expected = alone(name)
    assert expected["selected"] >= 0
    for process in several:
        found = process["trainings"][name]
        assert_near(found["weights"], expected["weights"], 1e-7)
        assert found["selected"] == expected["selected"]
        assert len(found["records"]) == len(expected["records"]) in (5, 6)
        for record, other in zip(found["records"], expected["records"], strict=True):
            assert record.keys() == other.keys()
            for key, value in other.items():
                assert record[key] == (value if value is None else pytest.approx(value, rel=1e-7))


def test_processes_hold_the_same_weights(several):
    for name in shared_steps.TRAININGS:
        first, *others = (process["trainings"][name]["weights"] for process in several)
        assert others
        for other in others:
            assert all(torch.equal(other[key], first[key]) for key in first)


def test_methods_that_draw_for_their_own_samples_only_are_refused(several):
    assert shared_steps.careless(None) == ""
    for process in several:
        assert "tightrope.draws.uniform_like" in process["careless"]
