"""`tightrope compare` and `estimate`: equal terms, one table, nothing hidden."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
from commands import SMALL, Commands

import tightrope as tr

# SMALL without its method.
EQUAL = tuple(a for i, a in enumerate(SMALL) if "--method" not in (a, SMALL[i - 1]))
SHORT = (*EQUAL, "--samples", "60", "--set", "taps.steps=3")


@pytest.fixture(scope="module")
def comparison(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison") / "all"
    outcome = commands.run(
        "compare", "--methods", "ibp,taps", "--seeds", "2", "--out", folder, *SHORT
    )
    assert outcome.code == 0, outcome.err
    for word in ("ibp", "taps", "natural", "certified", "±", "comparison.png"):
        assert word in outcome.out
    return folder


def test_runs_differ_in_method_and_seed_only(comparison: Path) -> None:
    runs = {f"{m}-{s}": tr.Run(comparison / f"{m}-{s}") for m in ("ibp", "taps") for s in (0, 1)}
    tables = {name: run.settings().to_table() for name, run in runs.items()}
    for name, table in tables.items():
        method, seed = name.split("-")
        assert (table.pop("method"), table.pop("seed")) == (method, int(seed))
        assert (table.pop("taps", None) is not None) == (method == "taps")
    assert len({json.dumps(table, sort_keys=True) for table in tables.values()}) == 1


def test_the_table_is_that_of_the_run_folders(comparison: Path) -> None:
    result = json.loads((comparison / "comparison.json").read_text())
    for entry in result["entries"]:
        assert entry["errors"] == [] and len(entry["runs"]) == 2
        for k, folder in enumerate(entry["runs"]):
            certified = json.loads((Path(folder) / "certification.json").read_text())
            estimated = json.loads((Path(folder) / "estimate.json").read_text())
            assert certified["samples"] == estimated["samples"] == 60
            for column in ("natural", "adversarial", "certified"):
                assert entry["values"][column][k] == certified[column]
            assert entry["values"]["taps"][k] == estimated["taps"]
    assert (comparison / "figures" / "comparison.png").stat().st_size > 5_000


def test_methods_are_grouped_by_what_they_guarantee(commands: Commands, tmp_path: Path) -> None:
    """Votes under noise have a table of their own, with radii of another norm."""
    folder = tmp_path / "all"
    arguments = ("compare", "--methods", "noise,pgd,ibp", "--out", folder, *EQUAL)
    few = ("--samples", "20", "--set", "pgd.steps=2")
    outcome = commands.run(*arguments, *few)
    assert outcome.code == 0, outcome.err
    proved, votes = outcome.out[outcome.out.index(str(folder)) :].split("votes under noise")
    assert "noise" not in proved and "certified at" not in proved
    assert proved.index(" ibp") < proved.index(" pgd") and "guarantee" in proved
    assert "certified at 0.25" in votes and " ibp" not in votes and " pgd" not in votes
    entries = json.loads((folder / "comparison.json").read_text())["entries"]
    assert [e["guarantee"] for e in entries] == ["probabilistic", "none", "deterministic"]
    noise = entries[0]["values"]
    smoothed = json.loads((folder / "noise-0" / "smoothing.json").read_text())
    assert smoothed["samples"] == 20 and smoothed["settings"]["sigma"] == 0.25
    assert noise["accuracy"] == [smoothed["accuracy"]]
    assert noise["certified at 0.5"] == [smoothed["certified"]["0.5"]]
    assert "certified" not in noise and not (folder / "noise-0" / "certification.json").exists()


def test_calling_again_uses_finished_runs(commands: Commands, comparison: Path) -> None:
    weights = comparison / "taps-1" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    arguments = ("compare", "--methods", "ibp,taps", "--seeds", "2", "--out", comparison)
    outcome = commands.run(*arguments, *SHORT, "--json")
    assert outcome.code == 0, outcome.err
    assert weights.stat().st_mtime_ns == before
    entry = next(e for e in outcome.json["entries"] if e["method"] == "taps")
    assert len(entry["values"]["natural"]) == 2


def test_several_jobs_print_the_same_table(commands: Commands, comparison: Path) -> None:
    arguments = ("compare", "--methods", "ibp,taps", "--seeds", "2", "--out", comparison, *SHORT)
    one, two = commands.run(*arguments), commands.run(*arguments, "--jobs", "2")
    assert (two.code, two.err) == (0, "") and one.code == 0
    table = one.out[one.out.index(str(comparison)) :]
    assert two.out.endswith(table)


def test_a_failing_run_is_reported_and_does_not_stop_the_others(
    commands: Commands, comparison: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "all [1]"
    shutil.copytree(comparison / "taps-0", folder / "taps-0")
    (folder / "taps-0" / "checkpoint.pt").write_bytes(b"no checkpoint")
    outcome = commands.run("compare", "--methods", "taps,ibp", "--out", folder, *SHORT)
    assert outcome.code == 1
    assert f"failed: {folder}" in outcome.out and "checkpoint.pt" in outcome.out
    assert (folder / "ibp-0" / "certification.json").exists()


def test_one_split_for_all(commands: Commands, tmp_path: Path) -> None:
    """TAPS accuracy is that of the largest classifier, for IBP's network, too."""
    folder = tmp_path / "all"
    settings = ("depth=2", "train_samples=256", "staps.steps=2", "staps.classifier_relus=1")
    outcome = commands.run(
        *("compare", "--methods", "ibp,taps,staps", "--out", folder, *SHORT, "--json"),
        *(part for s in (*settings, "taps.classifier_relus=2") for part in ("--set", s)),
    )
    assert outcome.code == 0, outcome.err
    assert outcome.json["classifier_relus"] == 2
    for method in ("ibp", "taps", "staps"):
        estimated = json.loads((folder / f"{method}-0" / "estimate.json").read_text())
        assert estimated["settings"]["classifier_relus"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "ibp,tabs"), "did you mean 'taps'?"),
        (("--methods", "ibp,ibp"), "different names"),
        (("--methods", ","), "different names"),
        (("--methods", "ibp", "--seeds", "0"), "seeds must lie in [1, 1000], got 0"),
        (("--methods", "ibp", "--jobs", "0"), "jobs must be at least 1, got 0"),
        (("--methods", "ibp", "--set", "seed=3"), "use methods and seeds"),
        (("--methods", "ibp", "--set", "taps.weight=3"), "belongs to none of the methods"),
        (("--methods", "ibp", "--preset", "nowhere/{method}"), "unknown preset"),
        (("--methods", "ibp", "--preset", ""), "unknown preset"),
        # whatever one of the trainings or the evaluation would refuse later
        (("--methods", "ibp,taps", "--set", "taps.connector=2"), "between 0 and 1"),
        (("--methods", "ibp,taps", "--set", "taps.classifier_relus=5"), "no split with 5 ReLUs"),
        (("--methods", "ibp,taps", "--set", "taps.conector=1"), "did you mean 'taps.connector'?"),
        (("--methods", "ibp", "--samples", "0"), "samples must lie in [1, 10000]"),
        (("--methods", "ibp", "--samples", "20000"), "samples must lie in [1, 10000]"),
        (("--methods", "ibp", "--eps", "0"), "(0, 1]"),
        (("--methods", "ibp", "--net", "cnn8"), "did you mean 'cnn7'?"),
        (("--methods", "ibp", "--data", "missing.npz"), "missing.npz"),
        (("--methods", "ibp", "--device", "abacus"), "abacus"),
    ],
)
def test_bad_input_is_refused(
    commands: Commands, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    outcome = commands.run("compare", "--out", tmp_path / "all", *arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert message in outcome.err and outcome.err.count("\n") == 1
    assert not (tmp_path / "all").exists()


def test_refusals_leave_a_comparison_alone(commands: Commands, comparison: Path) -> None:
    before = (comparison / "comparison.json").read_bytes()
    arguments = ("compare", "--methods", "ibp,taps", "--out", comparison, *SHORT)
    for change in (("--eps", "0"), ("--eps", "0.02"), ("--samples", "0")):
        assert commands.run(*arguments, *change).code == 2
    assert (comparison / "comparison.json").read_bytes() == before


def test_a_file_is_no_folder(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    outcome = commands.run("compare", "--methods", "ibp", "--out", tmp_path / "file", *SHORT)
    assert outcome.code == 2 and outcome.out == ""
    assert "is a file; give a folder" in outcome.err
    assert (tmp_path / "file").read_text() == "a file"


def test_means_and_deviations() -> None:
    entry = tr.Comparison(1, [], "").entries
    assert entry == []
    values = {"natural": [0.5, 0.7, 0.9]}
    from tightrope.study.comparing import Entry

    made = Entry("ibp", [], values)
    assert made.mean("natural") == pytest.approx(0.7)
    assert made.deviation("natural") == pytest.approx(statistics.stdev(values["natural"]))
    assert Entry("ibp", [], {"natural": [0.5]}).deviation("natural") is None


def test_estimates_are_in_order(commands: Commands, run: Path) -> None:
    found = commands.run("estimate", run, "--samples", "200", "--json").json
    # An attack finds less than everything, interval bounds more: the estimates lie between.
    assert found["ibp"] <= found["taps"] <= found["natural"]
    assert found["ibp"] <= found["sabr"] + 1e-9 and found["ibp"] <= found["pgd"]
    assert found["pgd"] <= found["natural"]
    human = commands.run("estimate", run, "--samples", "200")
    assert human.code == 0 and "not proofs" in " ".join(human.out.split())
    for key in ("natural", "pgd", "taps", "ibp"):
        assert f"{100 * found[key]:.2f}%" in human.out


def test_a_split_that_does_not_exist_is_refused(commands: Commands, run: Path) -> None:
    outcome = commands.run("estimate", run, "--classifier-relus", "9")
    assert outcome.code == 2 and "no split with 9 ReLUs" in outcome.err
    assert not (run / "estimate.json").exists()


def test_the_full_cnn7_trains_and_certifies(commands: Commands, tmp_path: Path) -> None:
    """The paper's network at its full size, for a few iterations."""
    run = tmp_path / "cnn7"
    few = ("train_samples=24", "validation=8", "batch_size=8", "annealing_epochs=1")
    options = ("taps.classifier_relus=3", "taps.steps=2")
    outcome = commands.run(
        *("train", "--net", "cnn7", "--method", "taps", "--epochs", "2", "--out", run),
        *(part for setting in (*few, *options) for part in ("--set", setting)),
    )
    assert outcome.code == 0, outcome.err
    history = tr.Run(run).history()
    assert [record["radius"] == 0.1 for record in history] == [False, True]
    module, _ = tr.Run(run).network()
    assert sum(p.numel() for p in module.parameters()) > 13_000_000
    certified = commands.run("certify", run, "--samples", "3", "--stages", "ibp", "--json")
    assert certified.code == 0 and certified.json["samples"] == 3
