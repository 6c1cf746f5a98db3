"""What tests do on Ray, in a process of its own: prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gated
import ray
from handmade import certifiable_run
from hangs import PATIENCE
from onnx_files import write_onnx, write_vnnlib
from parallel_tasks import Cards, Item, Seen, Squares, unable
from ray.cluster_utils import Cluster
from test_certification_sharing import hard_sample
from test_study_compare_jobs import SETTINGS as TWO
from test_study_compare_jobs import results
from test_study_reproduce_runner import BAD, SMALL

import tightrope as tr
from tightrope.certification import session
from tightrope.certification.instances import read_instances, verify_instances
from tightrope.certification.problem import CHOICES
from tightrope.parallel import RayCluster
from tightrope.parallel.on_ray import run_on_ray
from tightrope.study.runner import carry_out_all

TIMES = ("seconds", "times")
ASKED: dict[str, Any] = {"stages": ("ibp", "attack"), "steps": 5, "restarts": 2}
SETTINGS = {name: value for name, value in TWO.items() if name != "taps"}


def listening() -> list[str]:
    """Return the addresses that anything in this network listens at."""
    found = set()
    for name, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                found.add(local[:size])
    return sorted(found)


def journal(folder: Path) -> list[str]:
    path = folder / "certification.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def records(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, journal(folder))
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def kill_when_busy(cluster: Cluster, node: Any, killed: list[int]) -> None:
    """Kill a node when both workers have a second batch in hand, then let the other one go on."""
    end = time.monotonic() + PATIENCE
    while (
        len({path.name.partition("-")[0] for path in gated.folder().iterdir()}) < 2
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    killed += gated.pids(node.node_id)
    cluster.remove_node(node, allow_graceful=False)
    while any(Path(f"/proc/{pid}").exists() for pid in killed) and time.monotonic() < end:
        time.sleep(0.05)
    (gated.folder() / "open").touch()


def lost_node(scratch: Path) -> dict[str, Any]:
    """Certify on two nodes, of which one is killed in the middle."""
    session.BATCH = 2
    alone, run = certifiable_run(scratch / "alone"), certifiable_run(scratch / "run")
    tr.certify(alone, **ASKED)
    gated.folder().mkdir()
    session.Decider = gated.Gated  # type: ignore[misc]
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")  # to the head
    other = cluster.add_node(num_cpus=1)
    given: list[str] = []
    give = session.Session.give
    killed: list[int] = []

    def counted(self: Any, item: Any) -> Any:
        given.append(str(item))
        return give(self, item)

    session.Session.give = counted  # type: ignore[method-assign]
    killer = threading.Thread(target=kill_when_busy, args=(cluster, other, killed), daemon=True)
    killer.start()
    shown: list[int] = []
    where = {"engine": "ray", "address": cluster.address}
    summary = tr.certify(run, **where, jobs=2, progress=lambda s: shown.append(s.open), **ASKED)
    killer.join()
    found = {
        "listening": listening(),
        "killed": killed,
        "given": given,
        "records": records(run.folder),
        "expected": records(alone.folder),
        "points": [p.name for p in sorted(run.counterexamples.iterdir())],
        "expected_points": [p.name for p in sorted(alone.counterexamples.iterdir())],
        "complete": summary.complete,
        "shown": shown,
    }
    ray.shutdown()
    cluster.shutdown()
    return found


def drive(folder: Path) -> dict[str, Any]:
    """Be a driver that is killed: certify on the cluster whose address is in the environment."""
    session.BATCH = 2
    session.Decider = gated.Gated  # type: ignore[misc]
    where = {"engine": "ray", "address": os.environ["CLUSTER"], "jobs": 2}
    return {"complete": tr.certify(tr.Run(folder), **where, **ASKED).complete}


def lost_driver(scratch: Path) -> dict[str, Any]:
    """Kill a driver when both workers have a second batch in hand; then go on with another one."""
    session.BATCH = 2
    alone, run = certifiable_run(scratch / "alone"), certifiable_run(scratch / "run")
    tr.certify(alone, **ASKED)
    gated.folder().mkdir()
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    variables = {**os.environ, "CLUSTER": cluster.address}
    driver = subprocess.Popen([sys.executable, __file__, "drive", run.folder], env=variables)
    end = time.monotonic() + PATIENCE
    while len(list(gated.folder().iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    while len(journal(run.folder)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    waiting = gated.pids("*")
    driver.kill()
    driver.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in waiting) and time.monotonic() < end:
        time.sleep(0.05)
    before, left = journal(run.folder), [p for p in waiting if Path(f"/proc/{p}").exists()]
    given: list[str] = []
    give = session.Session.give

    def counted(self: Any, item: Any) -> Any:
        given.append(str(item))
        return give(self, item)

    session.Session.give = counted  # type: ignore[method-assign]
    summary = tr.certify(run, engine="ray", address=cluster.address, jobs=2, **ASKED)
    found = {
        "left": left,
        "waiting": len(waiting),
        "before": before,
        "after": journal(run.folder),
        "given": given,
        "records": records(run.folder),
        "expected": records(alone.folder),
        "points": [p.name for p in sorted(run.counterexamples.iterdir())],
        "expected_points": [p.name for p in sorted(alone.counterexamples.iterdir())],
        "complete": summary.complete,
    }
    cluster.shutdown()
    return found


def tasks(scratch: Path) -> dict[str, Any]:
    """Items that workers die of, on this machine alone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    seen, here = Seen(), RayCluster()
    items = [Item(1), Item(2, deaths=1), Item(4, deaths=9), Item(6, error="user"), Item(3)]
    run_on_ray(partial(Squares, scratch), items, seen, cluster=here, workers=2)
    try:
        run_on_ray(unable, [Item(1)], Seen(), cluster=here, workers=1)
    except FileNotFoundError as error:
        told = str(error.filename)
    ray.shutdown()
    return {
        "results": seen.results,
        "given": sorted(seen.given),
        "errors": {n: [type(e).__name__, str(e)] for n, e in seen.errors.items()},
        "unable": told,
    }


def cards(scratch: Path) -> dict[str, Any]:
    """Two cards, which Ray only believes in, half of one for each worker; then none for any."""
    found: dict[str, Any] = {}
    started = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=6, num_gpus=2, **started)
    for name, share, hoped in (("halves", 0.5, 4), ("none", 0.0, 6)):
        seen, folder = Seen(), scratch / name
        folder.mkdir()
        items = [Item(number) for number in range(20)]
        prepare = partial(Cards, folder, hoped)
        run_on_ray(prepare, items, seen, cluster=RayCluster(gpus_per_task=share), workers=None)
        found[name] = sorted({(pid, card) for _, pid, card in seen.messages})
    ray.shutdown()
    ray.init(num_cpus=1, num_gpus=0, **started)
    try:
        where = RayCluster(gpus_per_task=1.0)
        run_on_ray(partial(Squares, scratch), [Item(1)], Seen(), cluster=where, workers=None)
    except tr.UserError as error:
        found["refused"] = str(error)
    ray.shutdown()
    return found


def parts(scratch: Path) -> dict[str, Any]:
    """A sample whose search is worth sharing, on two workers."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    module, x, label = hard_sample()
    some_parts: list[str] = []
    shared = session.Session.shared

    def noted(self: Any, item: Any, some: list[Any]) -> None:
        some_parts.extend(type(part).__name__ for part in some)
        shared(self, item, some)

    session.Session.shared = noted  # type: ignore[method-assign]
    session.Decider = gated.Patient  # type: ignore[misc]
    summary = tr.certify(
        module,
        data=(x, label),
        eps="0.145",
        split="relu",
        cuts="off",
        timeout=600,
        engine="ray",
        jobs=2,
    )
    ray.shutdown()
    return {"parts": some_parts, "verified": summary.verified}


def studies(scratch: Path) -> dict[str, Any]:
    """Compare methods and carry out plans on a cluster that the command starts itself."""
    where = {"engine": "ray", "jobs": 1}
    tr.compare(["ibp"], out=scratch / "alone", **SETTINGS)
    tr.compare(["ibp"], out=scratch / "out", **where, **SETTINGS)
    assert not ray.is_initialized()  # it is gone with the command
    plans = carry_out_all([SMALL, BAD], scratch, jobs=1, threads=1, cluster=RayCluster())
    names = [sorted(p.name for p in (scratch / f / "ibp-0").iterdir()) for f in ("alone", "out")]
    return {
        "same": results(scratch / "alone") == results(scratch / "out"),
        "files": names,
        "failures": plans.failures,
        "journal": len(records(scratch / "runs" / "small")),
        "listening": listening(),
    }


def instances(scratch: Path) -> dict[str, Any]:
    """Decide a list of properties, here and on a cluster."""
    square = [("0", "1"), ("0", "1")]
    write_onnx(scratch / "net.onnx", ([[1, -1], [-1, 1]], [0, 0]), ([[1, 1], [0, 0]], [0.25, 0]))
    for bound in ("0.2499", "0.5"):
        write_vnnlib(scratch / f"{bound}.vnnlib", square, 2, f"(<= Y_0 {bound})")
    listed = scratch / "instances.csv"
    listed.write_text("net.onnx,0.2499.vnnlib,60\nnet.onnx,0.5.vnnlib,60\nnet.onnx,no.vnnlib,60\n")
    some = read_instances(listed)
    found = [
        verify_instances(some, scratch / f"{engine}.csv", choices=CHOICES, engine=engine, jobs=2)
        for engine in ("local", "ray")
    ]
    return {"results": [[(o.result, o.reason) for o in outcomes] for outcomes in found]}


CASES = {
    case.__name__: case
    for case in (lost_node, lost_driver, drive, tasks, cards, parts, studies, instances)
}

if __name__ == "__main__":
    result = CASES[sys.argv[1]](Path(sys.argv[2]))
    print("RESULT", json.dumps(result), flush=True)
