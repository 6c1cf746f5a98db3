"""Steps and trainings that several processes share, and one process computes alone.

As a program it is one of the processes: `python shared_steps.py FOLDER` computes everything with
the others and leaves what it found in `FOLDER/RANK.pt`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import training_reference as reference
from taught import teaching
from torch import Tensor, nn

from tightrope.errors import UserError
from tightrope.graph import trace
from tightrope.nets import Normalize
from tightrope.nets.distance import Bias, Distance, MeanShift, Nearest
from tightrope.training.assistance import assisted
from tightrope.training.distributed import Group, joined
from tightrope.training.objectives import METHODS, Loss, Objective, SortNet
from tightrope.training.settings import Settings
from tightrope.training.step import Step
from tightrope.training.trainer import Trainer

RADIUS, TARGET = 0.05, 0.2
ON_RELUS = [name for name, method in METHODS.items() if not method.trains_distances]
EVERYTHING = {
    "annealing": True,
    "regularizer_weight": 0.5,
    "natural_weight": 0.2,
    "l1": 1e-3,
    "count": 23,
}
# Network, and how the batch is computed.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm": ("norm", {}),
    "plain": ("plain", {"natural_weight": 0.3}),
    "odd parts": ("odd", {"accumulate": 2}),
    "everything": ("norm", EVERYTHING),
    "everything in parts": ("norm", {**EVERYTHING, "accumulate": 3}),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "taps": {"estimators": "single", "restarts": 2},
    "staps": {"attack_start": "input", "attack_restarts": 2, "restarts": 2},
    "pgd": {"restarts": 2},
    "diffai": {
        **{"domain": "hrand", "correlated": 5, "relu": "smooth", "loss": "margins"},
        **{"center": "random", "start_ratio": 0.5, "end_weight": 0.7},
    },
    "cap": {"projections": 5},
    "crown-ibp": {"loss": "fused", "bounds": "crown", "start_kappa": 0.5},
    "ad-cert": {"imitate": "rslad", "restarts": 2},
}


# What is put around the step of a method, and the network.
HELPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rgs": ("pgd", "norm", {"smoothing": "rgs", "smoothing_pairs": 2}),
    "pgpe": ("sabr", "norm", {"smoothing": "pgpe", "smoothing_pairs": 2}),
    "sam": ("taps", "norm", {"sam_rho": 0.1}),
    "edac": ("ibp", "odd", {"edac_weight": 0.3}),
    "tightness": ("ibp", "plain", {"tightness_weight": 0.1}),
    "edac, sam and tightness": (
        *("exp-ibp", "norm"),
        {"edac_weight": 0.3, "sam_rho": 0.1, "tightness_weight": 0.1},
    ),
}


def cases() -> dict[str, tuple[Any, str, dict[str, Any]]]:
    """Return objective, network and options of each step by name."""
    made = {}
    for method, kind in ((m, k) for m in ON_RELUS for k in KINDS):
        made[f"{method}, {kind}"] = (objective(method, KINDS[kind][0]), *KINDS[kind])
    for method, options in VARIANTS.items():
        made[f"{method} variant"] = (objective(method, **options), *KINDS["everything in parts"])
    for helper, (method, net, settings) in HELPERS.items():
        given = objective(method, net), net
        made[helper] = (*given, {"helpers": settings})
        made[f"{helper}, everything in parts"] = (
            *given,
            {**KINDS["everything in parts"][1], "helpers": settings},
        )
    for number, stage in enumerate(METHODS["colt"](layers=(0, 1, 2), steps=3).stages):
        made[f"colt, stage {number}"] = (stage.objective, "plain", {"accumulate": 1 + number % 2})
    for name, options in DISTANCES.items():
        made[f"sortnet, {name}"] = (SortNet(**options), *DISTANCE_KINDS[name])
    return made


def distance_net(head: Callable[[], list[nn.Module]]) -> nn.Sequential:
    """Return two layers of distances that keep some inputs only, and what comes behind."""
    torch.manual_seed(4)
    first = (nn.Flatten(), Distance(32, 14), MeanShift(14), Distance(14, 9, 0.6), MeanShift(9))
    return nn.Sequential(Normalize(0.4, 0.5), *first, *head()).double()


NETS = {
    **reference.NETS,
    "distances": lambda: distance_net(lambda: [Distance(9, 3, 0.6), Bias(3), Nearest()]),
    "head": lambda: distance_net(lambda: [nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3)]),
}
# More samples than keep the same inputs together, and a power on its way up.
DISTANCES: dict[str, dict[str, Any]] = {
    "mixture": {},
    "hinge": {"loss": "hinge", "mixing": 0.0, "end_mixing": 0.0},
    "largest": {},
    "head": {"loss": "head"},
}
DISTANCE_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": ("distances", {"progress": 0.3, "count": 71}),
    "hinge": ("distances", {"progress": 0.1, "accumulate": 3, "count": 70}),
    "largest": ("distances", {"progress": 1.0, "accumulate": 2, "count": 41}),
    "head": ("head", {"progress": 0.2, "accumulate": 2, "count": 70}),
}


def objective(method: str, net: str = "norm", **options: Any) -> Any:
    """Return the method with few steps and a split that the network has."""
    if hasattr(METHODS[method], "steps"):
        options = {"steps": 3, **options}
    if method in ("taps", "staps"):
        options = {"classifier_relus": 2 if net == "odd" else 1, **options}
    return METHODS[method](**options)


def step(case: tuple[Any, str, dict[str, Any]], group: Group | None) -> dict[str, Any]:
    """Return what one step leaves behind."""
    method, net, options = case
    options = dict(options)
    count, annealing = options.pop("count", 7), options.pop("annealing", False)
    helpers = Settings.parse(options.pop("helpers", {}))
    module = NETS[net]()
    options |= {**teaching(method, net), "tightness_weight": helpers.tightness_weight}
    plain = Step(trace(module, reference.SHAPE), method, TARGET, group=group, **options)
    taken = assisted(plain, helpers, torch.optim.SGD(module.parameters(), 1e-2))
    torch.manual_seed(3)
    result = taken(*reference.batch(count), RADIUS, annealing=annealing)
    return {
        "gradients": reference.gradients(module),
        "buffers": dict(module.named_buffers()),
        "random": torch.get_rng_state(),
        "sums": (result.samples, result.loss, result.natural, result.robust),
    }


TRAININGS: dict[str, dict[str, Any]] = {
    "selected": {"method": "taps", "taps.steps": 3, "select": "best", "accumulate": 2, "l1": 1e-4},
    "averaged": {
        "method": "staps",
        "staps.steps": 2,
        "staps.attack_steps": 2,
        "select": "last",
        "average_from": 2,
    },
    "taught": {"method": "ad-cert", "ad-cert.steps": 2, "select": "best"},
    "helped": {
        **{"method": "ibp", "sam_rho": 0.05, "edac_weight": 0.3, "tightness_weight": 1e-3},
        **{"select": "last", "average_from": 2, "average_decay": 0.9, "optimizer": "sgd"},
    },
    "smoothed": {"method": "pgd", "pgd.steps": 2, "smoothing": "rgs", "smoothing_pairs": 2},
    "staged": {
        "net": "plain",
        "method": "colt",
        "colt.layers": "0,1,2",
        "colt.steps": 2,
        "epochs": 6,
        "annealing_epochs": 0,
        "optimizer": "sgd",
        "select": "best",
    },
    "distances": {
        **{"net": "distances", "method": "sortnet", "sortnet.ramp_start": 1, "accumulate": 2},
        **{"sortnet.ramp_end": 4, "annealing_epochs": 0, "select": "best"},
    },
    "few": {"method": "standard", "select": "best", "precise_bn": True, "clip": 0.1},
}


class Shuffled:
    """Batches of the same samples in another order in every pass, drawn as `Batches` does."""

    def __init__(self, samples: int, size: int, seed: int, shuffled: bool = True) -> None:
        self.x, self.y = reference.batch(samples, seed)
        self.size, self.shuffled = size, shuffled

    def __len__(self) -> int:
        return -(-len(self.x) // self.size)

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.x)) if self.shuffled else torch.arange(len(self.x))
        yield from ((self.x[i], self.y[i]) for i in order.split(self.size))


def training(given: dict[str, Any], group: Group | None) -> dict[str, Any]:
    """Return what a whole training leaves behind: annealing, then the method itself."""
    shared = {"epochs": 5, "annealing_epochs": 2, "eps": 0.05, "learning_rate": 3e-3}
    given = {**shared, **given}
    module = NETS[given.pop("net", "norm")]()
    settings = Settings.parse(given).resolve(normalize=False, network={})
    made = settings.objective()
    teacher = reference.norm_net(9).eval() if made.needs_teacher else None
    cpu = torch.device("cpu")
    trainer = Trainer(module, reference.SHAPE, settings, made, cpu, group, teacher)
    records = []

    def note(_: Trainer, record: dict[str, Any], selected: bool) -> None:
        timeless = {k: v for k, v in record.items() if "seconds" not in k}
        records.append({**timeless, "selected": selected})

    # The last batch of validation has fewer samples than there are processes.
    validation = Shuffled(11, 5, seed=9, shuffled=False)
    trainer.run(Shuffled(55, 11, seed=8), validation, on_epoch=note)
    weights: dict[str, Tensor] = module.state_dict()
    return {"weights": weights, "records": records, "selected": trainer.selected_epoch}


class Careless:
    """A method that draws for its own samples only."""

    def __call__(self, model: Any, x: Tensor, y: Tensor, radius: float) -> Loss:
        return Loss(model.graph(x + radius * torch.rand_like(x)).mean())


def careless(group: Group | None) -> str:
    """Return what is said about such a method."""
    settings = Settings.parse({"method": "standard", "epochs": 1, "select": "last"})
    resolved = settings.resolve(normalize=False, network={})
    module, method = reference.norm_net(), type("Own", (Careless, Objective), {})()
    trainer = Trainer(module, reference.SHAPE, resolved, method, torch.device("cpu"), group)
    try:
        trainer.run(Shuffled(22, 11, seed=8), None)
    except UserError as error:
        return str(error)
    return ""


def everything(group: Group | None) -> dict[str, Any]:
    """Compute all of it."""
    torch.set_num_threads(1)
    steps = {name: step(case, group) for name, case in cases().items()}
    trainings = {name: training(given, group) for name, given in TRAININGS.items()}
    return {"steps": steps, "trainings": trainings, "careless": careless(group)}


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def local_group() -> dict[str, str]:
    """Return what keeps processes that meet on this machine to themselves."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}


def by_processes(size: int, folder: Path, patience: float) -> list[dict[str, Any]]:
    """Compute everything by several processes; return what each of them found."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    shared = {**os.environ, **local_group(), "WORLD_SIZE": str(size), "PYTHONPATH": path}
    started = [
        subprocess.Popen([sys.executable, __file__, folder], env={**shared, "RANK": str(rank)})
        for rank in range(size)
    ]
    try:
        assert [process.wait(patience) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


if __name__ == "__main__":
    with joined() as found:
        assert found is not None
        torch.save(everything(found), Path(sys.argv[1]) / f"{found.rank}.pt")
