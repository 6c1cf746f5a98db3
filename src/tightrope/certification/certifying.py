"""`tightrope.certify`: verdicts for the samples of a run, journalled as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tightrope.budget import PROVING_ADVICE, explaining_memory
from tightrope.certification.problem import CHOICES, check_choices, check_timeout
from tightrope.certification.properties import PIXELS, Domain, parse_norm
from tightrope.certification.session import Progress, Session
from tightrope.certification.sources import Wanted, opened
from tightrope.certification.stages import STAGES
from tightrope.errors import UserError, unknown_name
from tightrope.graph import Graph
from tightrope.parallel import choose_engine
from tightrope.radius import Radius
from tightrope.runs import Run
from tightrope.runs.examination import check_attack
from tightrope.runs.lock import Wait
from tightrope.runs.shards import Shard
from tightrope.runs.summary import Certification


@explaining_memory(f"{PROVING_ADVICE}; what is decided is saved")
def certify(
    run: Run | nn.Module | Graph | str | Path,
    *,
    data: tuple[Tensor, Tensor] | str | Path | None = None,
    out: str | Path | None = None,
    eps: Radius | Sequence[Radius] | None = None,
    samples: int | None = None,
    start: int = 0,
    domain: Domain = PIXELS,
    norm: float | str = "linf",
    stages: Sequence[str] | None = None,
    timeout: float = 60.0,
    steps: int = 200,
    restarts: int = 5,
    split: str = "auto",
    branching: str = "intercept",
    cuts: str = "auto",
    seed: int = 0,
    jobs: int | None = None,
    engine: str = "local",
    address: str | None = None,
    gpus_per_task: float = 0.0,
    shard: str | Shard | None = None,
    device: str | None = None,
    force: bool = False,
    wait: Wait = False,
    progress: Progress = lambda summary: None,
) -> Certification:
    """Certify test samples of a run; write `certification.jsonl` and `certification.json`.

    Instead of a run, it may be a module, a graph or the path of an ONNX file, with `data`: a pair
    (x, y) or an .npz file of `x_test` and `y_test`. The files then go to the folder `out`; without
    it nothing is written. `domain` is the range of values that its inputs can have.

    The radius is one of `norm`: linf, l2 or l1; a folder is about one of them. `eps` may be several
    radii: the `curve` of the result has the accuracies of each. What was interrupted continues;
    more samples and other radii add to it. Other settings, another network or other samples are an
    error unless `force` discards what is there. `stages` are by default those for the kind of
    network. `timeout` is how many seconds one sample may take;
    `steps` and `restarts` belong to the attack; `split`, `branching` and `cuts` to the search. A
    run in use is an error unless `wait` queues for it.

    `jobs` processes share the samples, or a Ray cluster (`engine="ray"`): that at `address`, or of
    this machine alone, by `jobs` workers or all that there is room for, each with `gpus_per_task`
    GPUs. Records are the same as far as rounding does not depend on the number of threads, in the
    order in which they come. A `shard` such as `"3/16"` is one of several parts of the samples, in
    `shards/3-of-16` of the run folder or in `out`; `merge` joins them. `progress` gets the summary
    so far, at least after each batch.
    """
    settings = _settings(stages, timeout, steps, restarts, seed, (split, branching, cuts))
    part = None if shard is None else Shard.parse(shard)
    if part is not None and engine == "ray":
        raise UserError("a shard is for machines without Ray: give either shard or engine ray")
    cluster = choose_engine(engine, address, gpus_per_task, jobs)
    wanted = Wanted(eps, samples, start, device, parse_norm(norm), part)
    with opened(run, data, out, domain, wanted, wait) as (source, lock):
        chosen = {"stages": list(source.usual_stages if stages is None else stages)}
        session = Session(source, chosen | settings | source.settings, force, progress)
        return session.decide_all(jobs, lock, cluster)


def _settings(
    stages: Sequence[str] | None,
    timeout: float,
    steps: int,
    restarts: int,
    seed: int,
    chosen: tuple[str, str, str],
) -> dict[str, Any]:
    """Return the settings that verdicts depend on, after a look at them."""
    if stages is not None:
        _check_stages(stages)
    check_attack(steps, restarts, seed)
    check_timeout(timeout)
    choices = asdict(check_choices(*chosen))
    return {
        "timeout": float(timeout),
        "steps": steps,
        "restarts": restarts,
        "seed": seed,
        # Earlier certifications do not name what was not to be chosen.
        **{name: value for name, value in choices.items() if value != getattr(CHOICES, name)},
    }


def _check_stages(stages: Sequence[str]) -> None:
    for name in stages:
        if name not in STAGES:
            raise unknown_name("stage", name, STAGES)
    if not stages or len(set(stages)) < len(stages):
        raise UserError(f"stages must be different names out of: {', '.join(STAGES)}")
