"""Work that is shared: half of the samples that wait, half of a search; nothing gets lost."""

from __future__ import annotations

import importlib
import json
import pickle
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tightrope as tr
from tightrope.answer import Verdict
from tightrope.certification.deciding import Decider, Task
from tightrope.certification.families import Families, combined
from tightrope.certification.names import DEFAULT_STAGES
from tightrope.certification.work_items import Batch, Part, Partial, Rest
from tightrope.parallel import RayCluster, Shared
from tightrope.parallel.scheduler import Scheduler
from tightrope.parallel.wishes import Wishes, wished
from tightrope.runs.journal import Record

session = importlib.import_module("tightrope.certification.session")
pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = {
    **{"stages": list(DEFAULT_STAGES), "timeout": 600.0, "steps": 5, "restarts": 1, "seed": 0},
    **{"split": "relu", "branching": "intercept", "cuts": "off"},
}
VERIFIED, FALSIFIED, UNKNOWN = Verdict.VERIFIED, Verdict.FALSIFIED, Verdict.UNKNOWN


def hard_sample() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A network and a sample that takes hundreds of subproblems at 0.13, and is robust there."""
    torch.manual_seed(3)
    module = nn.Sequential(
        *(nn.Linear(25, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))
    )
    with torch.no_grad():
        for layer in module:
            if isinstance(layer, nn.Linear):
                layer.weight *= 2
    x = torch.rand(1, 25)
    return module, x, module(x).argmax(1)


class Crew:
    """Workers that are asked to share all the time; the items of one after the other."""

    def __init__(self, module: nn.Module, eps: str, shares: int) -> None:
        task = Task(None, module, (25,), Fraction(eps), SETTINGS, torch.device("cpu"))
        self.decider, self.shares = Decider(pickle.loads(pickle.dumps(task))), shares
        self.messages: list[Any] = []
        self.items: list[Any] = []

    def work(self, item: Any) -> None:
        wishes = Wishes(share=self.shares > 0)

        def send(message: Any) -> None:
            if isinstance(message, Shared):
                self.shares -= 1
                wishes.share = self.shares > 0
                self.items += pickle.loads(pickle.dumps(message.items))
            self.messages.append(message)

        with wished(wishes):
            self.decider(item, send)


def batch(x: torch.Tensor, labels: torch.Tensor, **options: Any) -> Batch:
    return Batch(np.arange(len(x)), x.numpy(), labels.numpy(), **options)


def test_a_search_in_parts_has_the_same_verdict() -> None:
    module, x, label = hard_sample()
    alone, crew = Crew(module, "0.13", 0), Crew(module, "0.13", 3)
    alone.work(batch(x, label, origin=7))
    (whole,) = alone.messages
    assert whole.verdict is VERIFIED and whole.domains > 100 and whole.stage == "bab"
    crew.work(batch(x, label, origin=7))
    families = Families()
    while crew.items:
        part = crew.items.pop()
        assert isinstance(part, Part) and part.family == 7 and 0 < part.seconds < 600
        crew.work(part)
    told = []
    for message in crew.messages:
        if isinstance(message, Shared):
            families.add(*message.items)
        else:
            assert isinstance(message, Partial)
            told.append(families.end(message))
    assert len(told) == 4 and told[:3] == [None] * 3  # not before the last one
    found = told[3]
    assert found is not None and found.verdict is VERIFIED and found.margin > 0
    assert found.domains > 100 and not families.members
    assert found.times.keys() == whole.times.keys()


def test_a_counterexample_of_a_part_is_one_of_the_sample() -> None:
    module, x, label = hard_sample()
    crew = Crew(module, "0.3", 1)
    crew.decider.stages = {"bab": crew.decider.stages["bab"]}
    crew.work(batch(x, label, origin=1))
    for part in list(crew.items):
        crew.work(part)
    records = [m.record for m in crew.messages if isinstance(m, Partial)]
    records += [m for m in crew.messages if isinstance(m, Record)]
    found = combined(records)
    assert found.verdict is FALSIFIED and found.counterexample == "counterexamples/000000.npy"
    assert tr.verify(module, x[0], int(label), eps="0.3").verdict is FALSIFIED


def record(verdict: Verdict, margin: float | None = 1.0, domains: int = 3) -> Record:
    return Record(5, 0, 0, verdict, "bab", margin, 2.0, {"bab": 2.0}, domains=domains)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((VERIFIED, VERIFIED), VERIFIED),
        ((VERIFIED, UNKNOWN), UNKNOWN),
        ((UNKNOWN, VERIFIED), UNKNOWN),
        ((VERIFIED, FALSIFIED), FALSIFIED),
        ((UNKNOWN, FALSIFIED), FALSIFIED),
    ],
)
def test_what_parts_say_together(verdicts: tuple[Verdict, ...], expected: Verdict) -> None:
    found = combined([record(v, margin=2.0 - i) for i, v in enumerate(verdicts)])
    assert found.verdict is expected
    assert (found.domains, found.seconds, found.times) == (6, 4.0, {"bab": 4.0})
    if expected is VERIFIED:
        assert found.margin == 1.0


def test_parts_of_an_attempt_that_failed_prove_nothing() -> None:
    families = Families()
    part = Part(batch(torch.zeros(1, 2), torch.zeros(1)), 4, None, 1.0)  # type: ignore[arg-type]
    families.add(part)
    assert families.knows(part)
    families.forget(4)  # the worker at its root died, and others begin anew
    assert not families.knows(part)
    proved = record(VERIFIED)
    assert families.end(Partial(Record(**{**vars(proved), "index": 0}), 4, root=False)) is None


# --- a whole certification ------------------------------------------------------------------------


class Loss(BaseException):
    """The end of a worker."""


def two_workers(die_at: set[int]) -> Any:
    """Return an engine in this process: workers that share, and some that are lost."""

    def run(prepare: Any, items: Any, watcher: Any, **options: Any) -> None:
        work, count = pickle.loads(pickle.dumps(prepare))(), [0]
        scheduler: Scheduler[int, Any] = Scheduler(
            items, size=watcher.size, wanted=watcher.wanted, clock=lambda: 0.0
        )

        def send_as(worker: int, item: Any, wishes: Wishes, message: Any) -> None:
            count[0] += 1
            if count[0] in die_at:
                raise Loss
            message = pickle.loads(pickle.dumps(message))
            if isinstance(message, Shared):
                watcher.shared(item, message.items)
                scheduler.add(worker, message.items)
                wishes.share = len(scheduler.waiting.given) < 3
            else:
                watcher.message(item, message)

        for worker in range(100):
            scheduler.free(worker)
            given = scheduler.assign()
            if not given:
                break
            ((_, turn),) = given
            wishes = Wishes(share=True)
            try:
                with wished(wishes):
                    item = pickle.loads(pickle.dumps(watcher.give(turn.item)))
                    work(item, partial(send_as, worker, turn.item, wishes))
            except Loss:
                assert scheduler.lost(worker) is None
            else:
                watcher.finished(turn.item, None)
                scheduler.free(worker)
                scheduler.idle.clear()
        assert not scheduler.busy and not scheduler.waiting

    return run


@pytest.mark.parametrize("die_at", [set(), {3}, {5, 9}, {2, 12, 20}])
def test_every_sample_is_decided_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, die_at: set[int]
) -> None:
    """Batches, rests and parts, given away and given again: the records are those of one."""
    module, x, _ = hard_sample()
    x = torch.cat((x, torch.rand(9, 25, generator=torch.Generator().manual_seed(1))))
    data = x, module(x).argmax(1)
    options = {"data": data, "eps": "0.1", "split": "relu", "steps": 5, "cuts": "off"}
    monkeypatch.setattr(session, "BATCH", 5)
    alone = tr.certify(module, out=tmp_path / "alone", **options)
    monkeypatch.setattr(RayCluster, "check", lambda self: None)
    monkeypatch.setattr(session, "run_tasks", two_workers(die_at))
    shared = tr.certify(module, out=tmp_path / "shared", engine="ray", **options)
    lines = [
        [json.loads(line) for line in (tmp_path / n / "certification.jsonl").open()]
        for n in ("alone", "shared")
    ]
    found = [{r["index"]: (r["verdict"], r["stage"]) for r in several} for several in lines]
    assert found[0] == found[1] and all(len(several) == 10 for several in lines)
    assert any(stage == "bab" for _, stage in found[0].values())
    assert (alone.certified, alone.adversarial) == (shared.certified, shared.adversarial)
    for name in {r["counterexample"] for r in lines[1] if "counterexample" in r}:
        expected = (tmp_path / "alone" / name).read_bytes()
        assert (tmp_path / "shared" / name).read_bytes() == expected


def test_samples_that_wait_are_shared_first() -> None:
    module, x, label = hard_sample()
    x = x.repeat(4, 1)
    crew = Crew(module, "0.13", 1)
    crew.work(batch(x, label.repeat(4)))
    (rest,) = crew.items
    assert isinstance(rest, Rest) and [left.index for left in rest.left] == [0, 2]
    done = [m.index for m in crew.messages if isinstance(m, Record)]
    crew.work(rest)
    done += [m.index for m in crew.messages[len(done) + 1 :] if isinstance(m, Record)]
    assert sorted(done) == [0, 1, 2, 3]
