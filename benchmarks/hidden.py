"""Counterexamples that attacks miss: does any search call their properties proved?

    python benchmarks/hidden.py --out FOLDER [--timeout 120] [--other 10] [--only dense]

In the manner of SoundnessBench: trains small networks (`planting.py`) in which counterexamples are
planted that our strongest attacks miss, and verifies each property in the default mode and, with
less time, in each other mode of the search. `verified` is wrong, every time; how many
counterexamples are found is a matter of strength. Networks and answers are kept in the folder, and
what is there already is not done again. Ends with 1 if anything was called proved.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
from planting import FAMILIES, Plants, draw_plants, grow, hidden
from safetensors.torch import load_file, save_file
from torch import nn

import tightrope as tr
from tightrope.certification.names import CUTS, SPLITS
from tightrope.certification.search.branching import RULES

DEFAULT = "default"


def modes() -> dict[str, dict[str, str]]:
    """Return the options of `verify` for each mode of the search."""
    found: dict[str, dict[str, str]] = {DEFAULT: {}}
    found |= {f"split {split}": {"split": split} for split in SPLITS if split != "auto"}
    found |= {f"branching {rule}": {"branching": rule} for rule in RULES if rule != "intercept"}
    found |= {f"cuts {choice}": {"cuts": choice} for choice in CUTS if choice != "auto"}
    return found


def network_of(name: str, folder: Path, seed: int) -> tuple[nn.Sequential, Plants, list[int]]:
    """Return the network of a family, what is planted in it, and which of that attacks miss."""
    family, path = FAMILIES[name], folder / f"{name}-{seed}.safetensors"
    plants = draw_plants(family, seed)
    if path.exists():
        stored = load_file(path)
        network = family.build(seed).eval()
        kept = stored.pop("kept").nonzero()[:, 0].tolist()
        network.load_state_dict(stored)
        return network, plants, kept
    started = time.process_time()
    network = grow(family, plants, seed=seed)
    trained = time.process_time()
    missed = hidden(network, plants)
    save_file({**network.state_dict(), "kept": missed}, path)
    seconds = (trained - started, time.process_time() - trained)
    took = "training took {:.1f} s, attacks {:.1f} s".format(*seconds)
    count = f"{int(missed.sum()):>3} of {len(missed)}"
    print(f"{path.stem:<16} {count} planted stay hidden; {took}", flush=True)
    return network, plants, missed.nonzero()[:, 0].tolist()


def decide(
    network: nn.Sequential, plants: Plants, i: int, timeout: float, options: dict[str, str]
) -> dict[str, Any]:
    """Verify one property and say what came of it."""
    x, label = plants.x[i], int(plants.labels[i])
    answer = tr.verify(network, x, label, eps=plants.eps, timeout=timeout, **options)
    if answer.counterexample is not None:
        with torch.no_grad():  # found is found only if the network says so
            outputs = network(answer.counterexample[None])[0]
        inside = plants.box()[i : i + 1].contains(answer.counterexample[None])
        assert bool(inside[0]) and int(outputs.argmax()) != label
    return {
        "verdict": str(answer.verdict),
        "stage": answer.stage,
        "seconds": round(answer.seconds, 2),
        "subproblems": answer.subproblems,
        "bound": answer.bound,
    }


def answers(folder: Path, only: str, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each property in each mode; those that are known come first.

    What stayed open is asked again if there is more time for it now.
    """
    path = folder / "answers.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(a["name"], a["number"], a["mode"]): a for a in known}
    done = {
        key: a
        for key, a in done.items()
        if a["verdict"] != "unknown" or a["limit"] >= limits[key[2]]
    }
    yield from done.values()
    grown = {
        f"{name}-{seed}": network_of(name, folder, seed)
        for name, family in FAMILIES.items()
        for seed in range(family.networks)
        if only in name
    }
    print(f"{sum(len(kept) for _, _, kept in grown.values())} hidden counterexamples", flush=True)
    for mode, options in modes().items():
        for name, (network, plants, kept) in grown.items():
            for i in kept:
                if limits[mode] <= 0 or (name, i, mode) in done:
                    continue
                found = decide(network, plants, i, limits[mode], options)
                found = {"name": name, "number": i, "mode": mode, "limit": limits[mode], **found}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of networks and answers")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds, default mode")
    parser.add_argument("--other", type=float, default=10.0, help="seconds, each other mode")
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    limits = {m: arguments.timeout if m == DEFAULT else arguments.other for m in modes()}
    results: list[dict[str, Any]] = []
    for found in answers(arguments.out, arguments.only, limits):
        results.append(found)
        if found["verdict"] == "verified":
            print(f"WRONG: {found}", flush=True)
        elif len(results) % 20 == 0:
            print(f"{len(results)} answers, now {found['mode']}, {found['name']}", flush=True)
    print_table(results)
    sys.exit(any(found["verdict"] == "verified" for found in results))


def print_table(results: list[dict[str, Any]]) -> None:
    """Print, for each mode and family, how many counterexamples were found."""
    names = sorted({found["name"] for found in results})
    chosen = [mode for mode in modes() if any(found["mode"] == mode for found in results)]
    print("\nfound of all that are hidden, by network and mode")
    print(f"{'network':<16}" + "".join(f" {mode:>18}" for mode in chosen))
    for name in [*names, ""]:
        cells = []
        for mode in chosen:
            mine = [a for a in results if a["mode"] == mode and name in ("", a["name"])]
            found = sum(a["verdict"] == "falsified" for a in mine)
            cells.append(f" {f'{found}/{len(mine)}':>18}")
        print(f"{name or 'all':<16}" + "".join(cells))
    for mode in chosen:
        mine = [a for a in results if a["mode"] == mode]
        limits = sorted({a["limit"] for a in mine})
        seconds = sum(a["seconds"] for a in mine)
        print(f"{mode}: limit {limits} s, {seconds:.0f} s in all")
    wrong = sum(found["verdict"] == "verified" for found in results)
    print(f"{len(results)} answers, {wrong} of them wrong")


if __name__ == "__main__":
    main()
