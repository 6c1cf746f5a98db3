"""The pretended GPU raises and counts where a real one would raise and wait."""

import pytest
import torch
from pretend_cuda import CUDA, PretendTensor, pretend_cuda, real
from torch import nn


def on_gpu(*values):
    return torch.tensor(values).to("cuda")


def test_tensors_say_where_they_are():
    with pretend_cuda():
        made = [on_gpu(1.0), torch.zeros(2, device="cuda"), torch.arange(3, device=CUDA)]
        made += [made[0].new_ones(2), torch.rand_like(made[1]), made[2][1:], made[0].double()]
        for tensor in made:
            assert isinstance(tensor, PretendTensor)
            assert tensor.device == CUDA and tensor.is_cuda and not tensor.is_cpu
        assert on_gpu(1.0).cpu().device == torch.device("cpu")
        assert on_gpu(1.0).to(torch.zeros(1)).device == torch.device("cpu")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.where(x > 0, x, torch.zeros(3)),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: torch.rand(3, device="cuda", generator=torch.Generator()),
        lambda x: x.normal_(generator=torch.Generator()),
        lambda x: x.numpy(),
        lambda x: nn.Linear(3, 2)(x),
    ],
)
def test_mistakes_are_found(mistake):
    with pretend_cuda(), pytest.raises((RuntimeError, TypeError), match=r"cuda|devices|indices"):
        mistake(on_gpu(1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: (x > 1).nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: x.unique(), 1),
        (lambda x: torch.zeros(3).copy_(x), 1),
        (lambda x: x.repeat_interleave(x.long()), 1),
        (lambda x: x.repeat_interleave(2), 0),
        (lambda x: x[x.long() - 1], 0),
        (lambda x: torch.where(x > 1, x, 0).sum(), 0),
        (lambda x: 2 * x + torch.tensor(1.0), 0),
    ],
)
def test_waits_are_counted(read, waits):
    with pretend_cuda() as counts:
        x = on_gpu(1.0, 2.0, 3.0)
        counts.clear()
        read(x)
        assert counts.waits.total() == waits, counts.describe()


def test_kernels_are_counted_and_views_are_not():
    with pretend_cuda() as counts:
        x = on_gpu(1.0, 2.0, 3.0, 4.0).requires_grad_()
        counts.clear()
        y = (x.view(2, 2).t()[0] * 2).exp()
        assert counts.kinds == {"mul": 1, "exp": 1}
        y.sum().backward()
        assert counts.kinds["mul"] == 3 and counts.kinds["select_backward"] == 1
        assert counts.ops.total() == sum(counts.kinds.values())
        assert real(x.grad).tolist() == pytest.approx(
            [2 * 2.718281828**2, 0, 2 * 2.718281828**6, 0]
        )


def test_modules_and_optimisers_follow():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.rand(5, 3)

    def train(net, x):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1, foreach=True)
        net(x).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        return [real(t.detach()).clone() for t in net.state_dict().values()]

    import copy

    expected = train(copy.deepcopy(net), x)
    with pretend_cuda():
        found = train(copy.deepcopy(net).to("cuda"), x.to("cuda"))
    assert all(map(torch.equal, found, expected))
