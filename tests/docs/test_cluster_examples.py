"""The scripts for Slurm and the file for Ray: their commands exist, and they do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from test_commands import test_a_command_is_understood as understand
from torch.distributed.run import get_args_parser

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
JOB = {
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_ID": "7",
    "OUT": "runs/job",
}
# They note their words, one per line, instead of doing anything; `srun` does its command once.
NOTE = """#!/bin/sh
for word in "$0" "$@"; do printf "%s\\n" "$word" >> "$NOTES"; done
echo END >> "$NOTES"
"""
STANDS_IN = {
    "srun": '#!/bin/sh\nexec "$@"\n',
    "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\nnode3\\nnode4\\n'\n",
    "torchrun": NOTE,
    "ray": NOTE,
    "tightrope": NOTE,
}


def stand_ins(folder: Path, scripts: dict[str, str]) -> str:
    """Write programs into a folder; return a path on which they come first."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.pathsep.join((str(folder), os.environ.get("PATH", "")))


def noted(script: str, tmp_path: Path, *arguments: str, **variables: str) -> list[list[str]]:
    """Return the commands that a script gives, with the names of programs before their words."""
    notes = tmp_path / "notes"
    environment = {"PATH": stand_ins(tmp_path / "bin", STANDS_IN), "NOTES": str(notes), **variables}
    command = ["sh", str(EXAMPLES / script), *arguments]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    commands = [part.splitlines() for part in notes.read_text().split("END\n")[:-1]]
    return [[Path(words[0]).name, *words[1:]] for words in commands]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_script_has_no_mistakes_of_grammar(script: Path, shell: str) -> None:
    subprocess.run([shell, "-n", str(script)], check=True)
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert options and all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w-]+)?", line) for line in options)


def test_the_job_trains_and_then_certifies(tmp_path: Path) -> None:
    train, certify = noted("slurm_job.sh", tmp_path, "--eps", "0.1", **JOB)
    assert train[0] == "torchrun"
    told = get_args_parser().parse_args(train[1:])
    assert (told.nnodes, told.nproc_per_node, told.rdzv_endpoint) == ("4", "2", "node1:29400")
    assert told.module and told.training_script == "tightrope"
    understand(["tightrope", *told.training_script_args])
    assert told.training_script_args[-3:] == ["--resume", "--eps", "0.1"]
    assert certify[:2] == ["ray", "symmetric-run"]
    words = certify[certify.index("--") + 1 :]
    understand(words)
    assert words[:3] == ["tightrope", "certify", "runs/job"]
    assert words[words.index("--address") + 1] == "node1:6379"


def test_each_task_certifies_a_shard(tmp_path: Path) -> None:
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16", "SLURM_CPUS_PER_TASK": "8"}
    (words,) = noted("slurm_shards.sh", tmp_path, "runs/a", "--samples", "500", **task)
    understand(words)
    assert words[1:5] == ["certify", "runs/a", "--shard", "3/16"]
    assert words[5:] == ["--jobs", "8", "--samples", "500"]


def test_the_commands_in_the_cluster_file_exist() -> None:
    text = (EXAMPLES / "ray_cluster.yaml").read_text()
    commands = re.findall(r"'(tightrope .*?)'", text)
    assert len(commands) == 1
    understand(shlex.split(commands[0]))


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_ray_takes_the_cluster_file() -> None:
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    def check(config: dict[str, Any]) -> None:
        validate_config(prepare_config(config))

    config = yaml.safe_load((EXAMPLES / "ray_cluster.yaml").read_text())
    check(config)
    with pytest.raises(Exception, match="setup_command"):
        check({**config, "setup_command": "a name that Ray does not know"})


# The rest runs everything for real, on a cluster of one machine.
REAL = {
    "srun": '#!/bin/sh\nexec "$@"\n',
    "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
    "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    "ray": f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n',
    "tightrope": f'#!/bin/sh\nexec {sys.executable} -m tightrope "$@"\n',
}
SMALL = (
    *("--net", "mlp", "--set", "width=8", "--set", "depth=1", "--set", "batch_norm=false"),
    *("--method", "ibp", "--eps", "0.01", "--epochs", "2", "--set", "train_samples=200"),
    *("--set", "validation=50", "--set", "batch_size=50", "--device", "cpu"),
)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_the_job_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "parallel"))
    import loopback

    if (why := loopback.why_not()) is not None:
        pytest.skip(why)
    job = {**JOB, "SLURM_JOB_NUM_NODES": "1", "OUT": str(tmp_path / "run"), "SAMPLES": "20"}
    path = stand_ins(tmp_path / "bin", REAL)
    script = "import os, sys; os.execv('/bin/sh', ['sh', *sys.argv[1:]])"
    words = ("-c", script, str(EXAMPLES / "slurm_job.sh"), *SMALL)
    with loopback.started(*words, PATH=path, HOME=str(tmp_path), **job) as process:
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    assert "certified" in out
    assert len((tmp_path / "run" / "certification.jsonl").read_text().splitlines()) == 20
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 2
