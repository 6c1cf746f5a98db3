"""Workers on a Ray cluster, on however many machines.

As with local processes, workers only compute, and this process alone hears what they find. Nothing
is shared but messages: a task carries all that it needs. A worker that is lost, with its machine or
without, is replaced as soon as there is room for another one; its item goes to whoever is free.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic

import torch

from tightrope.errors import UserError
from tightrope.parallel.processes import continue_later, explained
from tightrope.parallel.ray_worker import CONCURRENCY, RayWorker
from tightrope.parallel.reaching import check_address
from tightrope.parallel.scheduler import ATTEMPTS, Scheduler, Turn
from tightrope.parallel.task import Item, Prepare, Watcher
from tightrope.parallel.worker import Says
from tightrope.version import __version__
from tightrope.waiting import sleeping_threads

GLANCE_SECONDS = 0.25  # between two looks at who is idle, if nothing is heard
GROWTH_SECONDS = 10.0  # between two looks at how large the cluster is
PATIENCE_SECONDS = 600.0  # until a cluster without room for a single worker is given up


@dataclass(frozen=True)
class RayCluster:
    """Which cluster, and what a worker needs of it; without an address, this machine alone."""

    address: str | None = None
    gpus_per_task: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where workers compute."""
        return torch.device("cuda" if self.gpus_per_task else "cpu")

    def check(self) -> None:
        """Refuse what cannot work, before anything is done."""
        ray = load_ray()
        if not 0 <= self.gpus_per_task < math.inf:
            raise UserError(f"gpus per task must be 0 or more, got {self.gpus_per_task}")
        if self.gpus_per_task > 1 and self.gpus_per_task % 1:
            raise UserError(
                f"gpus per task must be whole, or a share of one, got {self.gpus_per_task}"
            )
        if self.address is not None:
            check_address(_found_by(ray, self.address))


def _found_by(ray: Any, address: str) -> str:
    """Return the address that Ray has noted for `auto`: that cluster may be gone by now."""
    services = getattr(getattr(ray, "_private", None), "services", None)
    look = getattr(services, "canonicalize_bootstrap_address", None)
    if address != "auto" or look is None:
        return address
    return look(address) or address


def load_ray() -> Any:
    """Return Ray's module, or say how to get it."""
    # Before it is imported: nobody has been asked whether to report to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed: pip install 'tightrope[ray]'") from None
    return ray


def run_on_ray(
    prepare: Prepare[Item],
    items: Iterable[Item],
    watcher: Watcher[Item],
    *,
    cluster: RayCluster,
    workers: int | None,
) -> None:
    """Do the work on a cluster, by so many workers, or as many as it has room for.

    As with local processes, an item is given to `ATTEMPTS` workers at most, and no worker survives.
    Where nothing waits and somebody is idle, others are asked to share.
    """
    with connected(cluster) as ray:
        crew = _RayCrew(ray, cluster, prepare, items, watcher, workers)
        try:
            crew.supervise()
        finally:
            crew.stop()


@contextmanager
def connected(cluster: RayCluster) -> Iterator[Any]:
    """Use a cluster: the one that this process is connected to already, or the one named."""
    cluster.check()
    ray = load_ray()
    if ray.is_initialized():
        yield ray
        return
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    check_address(_found_by(ray, address))
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == "local":
        options["include_dashboard"] = False
    try:
        ray.init(address=address, namespace="tightrope", **options)
    except ConnectionError as error:
        raise UserError(f"no Ray cluster answers at {address}: {error}") from None
    except RuntimeError as error:  # another version of Ray or Python there
        raise UserError(f"the Ray cluster at {address} is of no use: {error}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(eq=False)
class _Member:
    """The driver's side of a worker."""

    actor: Any
    listening: Any  # the reference to what it says next
    ready: bool = False
    stopped: bool = False  # what it is at is not wanted any more


class _RayCrew(Generic[Item]):
    """All workers, and what is left for them."""

    def __init__(
        self,
        ray: Any,
        cluster: RayCluster,
        prepare: Prepare[Item],
        items: Iterable[Item],
        watcher: Watcher[Item],
        workers: int | None,
    ) -> None:
        self.ray, self.cluster, self.watcher, self.wanted = ray, cluster, watcher, workers
        self.scheduler: Scheduler[_Member, Item] = Scheduler(
            items, size=watcher.size, wanted=watcher.wanted
        )
        # Once for all: workers on one machine share it. Classes of a script travel, too.
        self.task = ray.put(ray.cloudpickle.dumps(prepare))
        self.members: list[_Member] = []
        self.early_deaths = 0  # in a row
        self.looked = -math.inf
        self.heard = time.monotonic()
        environment = {"OMP_NUM_THREADS": "1", **sleeping_threads({})}
        if not cluster.gpus_per_task:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # nobody uses what was not asked for
        self.actor = ray.remote(RayWorker).options(
            num_cpus=1,
            num_gpus=cluster.gpus_per_task,
            max_concurrency=CONCURRENCY,
            max_restarts=0,
            runtime_env={"env_vars": environment},
        )

    def supervise(self) -> None:
        """Give items to whoever is free and pass on what comes back, until nothing is left."""
        while not self.scheduler.is_over:
            self._hire()
            self._hear_all()
            for member in self.scheduler.unwanted():
                if not member.stopped:
                    member.stopped = True
                    member.actor.wish.remote("stop")
            for member, turn in self.scheduler.assign():
                self._give(member, turn)
            for member in self.scheduler.ask():
                member.actor.wish.remote("share")

    def stop(self) -> None:
        """End all workers, also those that have not begun for want of room."""
        for member in self.members:
            with suppress(Exception):  # the cluster may be gone
                self.ray.kill(member.actor)

    def _room(self) -> int:
        """Return how many workers the cluster has room for."""
        found = self.ray.cluster_resources()
        room = math.floor(found.get("CPU", 0))
        if self.cluster.gpus_per_task:
            gpus = found.get("GPU", 0)
            share = self.cluster.gpus_per_task
            if not gpus:
                raise UserError("--gpus-per-task is given, but the cluster has no GPU")
            room = min(
                room,
                math.floor(gpus) * math.floor(1 / share) if share < 1 else math.floor(gpus / share),
            )
        return room

    def _hire(self) -> None:
        """Start workers: those who are missing, and more where the cluster has grown."""
        now = time.monotonic()
        if not any(member.ready for member in self.members):
            if now - self.heard > PATIENCE_SECONDS:
                raise UserError(
                    f"the cluster had no room for a worker for {PATIENCE_SECONDS:.0f} s; see "
                    "`ray status`, and run it again to continue"
                )
        else:
            self.heard = now
        if now - self.looked < GROWTH_SECONDS and len(self.members):
            return
        self.looked = now
        most = max(1, self._room() if self.wanted is None else self.wanted)
        for _ in range(most - len(self.members)):
            actor = self.actor.remote(__version__, 1)
            actor.begin.remote(self.task)
            self.members.append(_Member(actor, actor.listen.remote()))

    def _hear_all(self) -> None:
        """Wait for somebody to say something, and hear everybody who has."""
        listening = {member.listening: member for member in self.members}
        ready, _ = self.ray.wait([*listening], num_returns=1, timeout=GLANCE_SECONDS)
        if ready:
            ready, _ = self.ray.wait([*listening], num_returns=len(listening), timeout=0)
        for reference in ready:
            member = listening[reference]
            try:
                said = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                self._replace(member, error)
                continue
            member.listening = member.actor.listen.remote()
            for content in said:
                self._hear(member, *pickle.loads(content))

    def _hear(self, member: _Member, kind: Says, content: Any) -> None:
        if kind is Says.READY:
            self.early_deaths, member.ready = 0, True
            self.scheduler.free(member)
            return
        if kind is Says.UNABLE:
            raise explained(content, None)
        turn = self.scheduler.busy[member]
        if kind is Says.MESSAGE:
            self.watcher.message(turn.item, content)
        elif kind is Says.SHARED:
            self.watcher.shared(turn.item, content)
            self.scheduler.add(member, content)
        else:
            self.scheduler.free(member)
            if kind is Says.FINISHED:
                self.watcher.finished(turn.item, content)
            else:
                self.watcher.failed(turn.item, explained(content, turn.item))

    def _give(self, member: _Member, turn: Turn[Item]) -> None:
        member.stopped = False
        member.actor.take.remote(pickle.dumps(self.watcher.give(turn.item)))

    def _replace(self, member: _Member, error: Exception) -> None:
        """Let others take over from a worker that is lost."""
        self.members.remove(member)
        self.looked = -math.inf
        with suppress(Exception):  # it may be unreachable rather than dead
            self.ray.kill(member.actor)
        if not member.ready:
            self.early_deaths += 1
            if self.early_deaths == ATTEMPTS:
                raise self._death(error, None)
        turn = self.scheduler.lost(member)
        if turn is not None:
            self.watcher.failed(turn.item, self._death(error, turn.item))

    def _death(self, error: Exception, item: object) -> UserError:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f" ({lines[0][:200].rstrip('.')})" if lines else ""
        return continue_later(f"{ATTEMPTS} times a worker on the cluster was lost{why}", item)
