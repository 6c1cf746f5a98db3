"""The choice of an engine: this process, several on this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable

from tightrope.errors import UserError, shorten, unknown_name
from tightrope.parallel.on_ray import RayCluster, run_on_ray
from tightrope.parallel.processes import run_in_processes
from tightrope.parallel.task import Item, Prepare, Watcher, run_here

ENGINES = ("local", "ray")


def choose_engine(
    engine: str, address: str | None, gpus_per_task: float, jobs: int | None
) -> RayCluster | None:
    """Return the cluster that was asked for, None for this machine; refuse what makes no sense."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if jobs is not None and jobs < 1:
        raise UserError(f"jobs must be at least 1, got {shorten(jobs)}")
    if engine == "local":
        if address is not None or gpus_per_task:
            raise UserError("address and gpus per task go with engine ray")
        return None
    cluster = RayCluster(address, float(gpus_per_task))
    cluster.check()
    return cluster


def run_tasks(
    prepare: Prepare[Item],
    items: Iterable[Item],
    watcher: Watcher[Item],
    *,
    workers: int | None,
    threads: int = 1,
    share: object = None,
    cluster: RayCluster | None = None,
) -> None:
    """Do the work on a cluster, or here: by one worker in this process, by several in others."""
    if cluster is not None:
        run_on_ray(prepare, items, watcher, cluster=cluster, workers=workers)
    elif workers is not None and workers > 1:
        run_in_processes(prepare, items, watcher, workers=workers, threads=threads, share=share)
    elif workers:
        run_here(prepare, items, watcher)
