"""The memory budget: what is free, by whom it is limited, and who gets by with less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tightrope.box import Box
from tightrope.budget import ASSUMED, PARTS, STEP, fitting, free_memory, memory_budget, rows_at_once
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import CROWN, reduction_fits, relax
from tightrope.graph import trace
from tightrope.graph.work import fan_in, heaviest, products
from tightrope.precision import ROUNDING

GB = 1 << 30
CPU = torch.device("cpu")


def system(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="ascii")
    return folder


MACHINE = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\n"}
SECOND = {
    **MACHINE,
    "proc/self/cgroup": "0::/box/inner\n",
    "sys/fs/cgroup/box/inner/memory.max": "max\n",
    "sys/fs/cgroup/box/inner/memory.current": f"{GB}\n",
    "sys/fs/cgroup/box/memory.max": f"{4 * GB}\n",
    "sys/fs/cgroup/box/memory.current": f"{3 * GB}\n",
    "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {GB}\n",
}
FIRST = {
    **MACHINE,
    "proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/docker/abc\n",
    # In a container the groups of outside do not exist, and the root is its own.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
    "sys/fs/cgroup/memory/memory.stat": "cache 7\ntotal_inactive_file 4096\n",
}


@pytest.mark.parametrize(
    ("files", "free"), [(MACHINE, 8 * GB), (SECOND, 2 * GB), (FIRST, 2 * GB + 4096)]
)
def test_what_is_free_of_a_machine_and_of_containers(
    files: dict[str, str], free: int, tmp_path: Path
) -> None:
    assert free_memory(system(tmp_path, files)) == free


def test_a_container_that_is_full_has_nothing_free(tmp_path: Path) -> None:
    full = {**SECOND, "sys/fs/cgroup/box/memory.current": f"{6 * GB}\n"}
    assert free_memory(system(tmp_path, full)) == 0


def test_a_system_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sysconf", raising=False)
    assert free_memory(tmp_path) == ASSUMED


def test_users_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightrope.budget.free_memory", lambda: 9 * GB)
    monkeypatch.setattr("tightrope.budget.kept_memory", lambda: GB)
    assert memory_budget(CPU) == 5 * GB
    monkeypatch.setenv("TIGHTROPE_LIMIT_MEMORY_BYTES", "8000")
    assert memory_budget(CPU) == 8000
    assert fitting(GB, CPU) == 8000 // PARTS
    assert fitting(10, CPU) == 10


def test_rows_fit_into_memory_and_into_a_step() -> None:
    assert rows_at_once(1000, 100) == 10
    assert rows_at_once(1000, 5000) == 1
    assert rows_at_once(GB, 1, STEP / 7) == 7
    assert rows_at_once(GB, 1, 2 * STEP) == 1


def test_work_of_a_network() -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 5)
    )
    graph = trace(module, (2, 6, 6))
    assert [fan_in(node.op) for node in graph.nodes] == [1, 18, 1, 4, 1, 12]
    assert products(graph.nodes) == 72 + 48 * 18 + 48 + 12 * 4 + 12 + 60
    assert heaviest(graph.nodes) == 48 * 18


def test_bounds_with_hardly_any_memory_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)
    )
    graph = trace(module.double(), (1, 8, 8)).detach()
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    owner = torch.tensor([0, 0, 1, 1, 1])
    rows = Coefficients(torch.randn(5, 6, dtype=torch.float64), owner)

    def bounds() -> torch.Tensor:
        found = relax(graph, Box(x - 0.1, x + 0.1), effort=CROWN, rounding=ROUNDING)
        return found.lower(found.output, rows)

    before = bounds()
    pulled = []
    original = Coefficients.split
    monkeypatch.setattr(Coefficients, "split", lambda c, n: pulled.append(n) or original(c, n))
    monkeypatch.setenv("TIGHTROPE_LIMIT_MEMORY_BYTES", "1")
    assert torch.allclose(bounds(), before, rtol=1e-9, atol=1e-9)
    assert set(pulled) == {1}


def test_rows_without_owners_are_split() -> None:
    batch = Coefficients(torch.arange(6.0).view(3, 2), None).split(2)
    assert [part.values.tolist() for part in batch] == [[[0, 1], [2, 3]], [[4, 5]]]
    field = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert torch.cat([part.dot(field) for part in batch]).tolist() == [0.0, 3.0, 9.0]
    assert torch.cat([part.dot(field[2:]) for part in batch]).tolist() == [1.0, 5.0, 9.0]


def test_a_reduction_beyond_the_budget_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graph = trace(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)).double(), (3,))
    box = Box(-torch.ones(1, 3).double(), torch.ones(1, 3).double())
    relaxation = relax(graph.detach(), box, effort=CROWN, rounding=ROUNDING)
    assert reduction_fits(relaxation)
    monkeypatch.setenv("TIGHTROPE_LIMIT_MEMORY_BYTES", "100")
    assert not reduction_fits(relaxation)
