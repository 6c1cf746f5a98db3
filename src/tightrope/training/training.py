"""`tightrope.train`: from settings to a run folder."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tightrope import data, nets
from tightrope.budget import TRAINING_ADVICE, explaining_memory
from tightrope.errors import UserError, shorten
from tightrope.files import write_text
from tightrope.reading import MADE_WITH
from tightrope.runs import Run
from tightrope.runs.config import train_arguments, write
from tightrope.runs.lock import Wait
from tightrope.training.checkpoints import load_checkpoint, save_checkpoint
from tightrope.training.distributed import Group, each, first, joined, own_device
from tightrope.training.objectives import METHODS, Objective, section
from tightrope.training.presets import load_preset
from tightrope.training.settings import Settings, describe_settings, flatten
from tightrope.training.teachers import load_teacher
from tightrope.training.trainer import Progress, Trainer
from tightrope.version import versions

NETWORK_ARGUMENTS = ("width", "hidden", "depth", "blocks", "batch_norm", "keep")
# Settings that a command says even if they are the default.
MAIN = ("data", "net", "method", "eps", "epochs", "seed")
EVALUATION_BATCH = 1000


def train(
    *,
    out: str | Path,
    preset: str | None = None,
    method: str | Objective | None = None,
    resume: bool = False,
    force: bool = False,
    wait: Wait = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Train a network and return its run folder.

    `settings` are those of `tightrope.training.settings.Settings` (`data`, `net`, `eps`,
    `epochs`, ...); `method` is a name or an objective such as `tr.IBP()`. Values given here
    override those of `preset`. An existing run in `out` is an error unless `resume` continues
    it (then the settings may be left out) or `force` replaces it. A folder that another command
    is working on is an error unless `wait` queues for it. Where `torchrun` has started several
    processes and all of them call this, they train one network together.
    """
    run = Run(Path(out))
    with joined() as group, explaining_memory(TRAINING_ADVICE), ExitStack() as held:
        given, objective = each(group, lambda: _gather(preset, method, settings))
        own = _own_class(objective)

        def wanted() -> Settings:
            return _wanted(run, given, own, resume, force)

        def session(settings: Settings) -> _Session:
            made = each(group, lambda: _Session(run, settings, objective, group))
            if group is not None:
                taught = made.settings.teacher_weights or ""
                group.check_same({"its data": made.data.digest(), "its teacher": taught})
            return made

        if group is not None:
            group.check_same({**versions(), **_told(given, objective)})
        before = first(group, wanted)
        work = session(before)  # refuses the rest before anything is written
        first(group, lambda: _hold(held, run, wait))
        found = first(group, wanted)  # somebody may have been here in the meantime
        if found != before:
            work = session(found)
        if first(group, lambda: resume and run.checkpoint.exists()):
            work.restore()
        else:
            first(group, work.begin)
        work.run_training(progress)
    return run


def _hold(held: ExitStack, run: Run, wait: Wait) -> None:
    held.enter_context(run.lock("train", wait))


def _told(given: dict[str, Any], objective: Objective | None) -> dict[str, str]:
    """Return what this process was told to train, to be compared with the others."""
    return {**{name: str(value) for name, value in given.items()}, "method": repr(objective)}


def check_training(
    *,
    out: str | Path,
    preset: str | None = None,
    method: str | Objective | None = None,
    resume: bool = False,
    force: bool = False,
    **settings: Any,
) -> tuple[Settings, data.Dataset]:
    """Refuse what `train` would refuse, and write nothing; return all settings and the data."""
    run = Run(Path(out))
    given, objective = _gather(preset, method, settings)
    own = _own_class(objective)
    session = _Session(run, _wanted(run, given, own, resume, force), objective)
    return session.settings, session.data


def _wanted(
    run: Run, given: dict[str, Any], own: type[Objective] | None, resume: bool, force: bool
) -> Settings:
    """Return the settings to train with; refuse to write over anything, unless told to."""
    if resume and run.config.exists():
        given = _stored_settings(run, given, own)
    else:
        _check_folder(run, force)
    return Settings.parse(given, own)


def _check_folder(run: Run, force: bool) -> None:
    """Refuse a folder with something in it, unless told to replace it."""
    if run.folder.exists() and not run.folder.is_dir():
        raise UserError(f"{run.folder} is a file; give a folder as --out")
    if force or not run.folder.exists():
        return
    others = run.foreign()
    # Settings alone are a run that ended before its first epoch: nothing is lost.
    if others and run.config.exists():
        raise UserError(f"{run.folder} already holds a run; use --resume to continue it or --force")
    if others:
        raise UserError(
            f"{run.folder} holds {others[0]}, which is not of a run; give another --out, or --force"
        )


def _gather(
    preset: str | None, method: str | Objective | None, settings: dict[str, Any]
) -> tuple[dict[str, Any], Objective | None]:
    given = load_preset(preset) if preset is not None else {}
    objective = None
    if isinstance(method, str):
        settings = {"method": method, **settings}
    elif method is not None:
        objective, own = method, _own_settings(method)
        twice = sorted(flatten(own).keys() & flatten(settings).keys())
        if twice:
            raise UserError(f"{twice[0]} is given twice: set it in the method object")
        settings = {**own, **settings}
    given |= flatten(settings)
    if settings.get("method") and "method" in given:
        # Another method than the preset's makes the preset's method options meaningless.
        others = tuple(f"{section(m)}." for m in METHODS if m != given["method"])
        asked = flatten(settings)
        given = {k: v for k, v in given.items() if k in asked or not k.startswith(others)}
    return given, objective


def _own_class(objective: Objective | None) -> type[Objective] | None:
    """Return the class of a method object that the table does not know."""
    return None if objective is None or objective.name in METHODS else type(objective)


def _own_settings(method: Objective) -> dict[str, Any]:
    """Return the name and the options of a method object as settings."""
    if not isinstance(method, Objective) or not dataclasses.is_dataclass(method):
        raise UserError(
            "method must be a name or an objective such as tr.TAPS() (a dataclass that inherits "
            f"tr.Objective), got {shorten(method)}"
        )
    return {"method": method.name, method.section: dataclasses.asdict(method)}


def _stored_settings(
    run: Run, given: dict[str, Any], own: type[Objective] | None
) -> dict[str, Any]:
    """Return the settings of the run to resume; what is given must agree with them."""
    stored = run.values()
    wanted = Settings.parse({**stored, **given}, own).to_table()
    before = Settings.parse(stored, own).to_table()
    changed = [name for name in wanted if wanted[name] != before.get(name) and name != "device"]
    if changed:
        raise UserError(
            f"{run.folder} was trained with other settings ({', '.join(changed)}); "
            "resume without them, or start over with --force"
        )
    return {**stored, "device": wanted["device"]}  # where it is computed may change


def chosen(settings: Settings) -> dict[str, Any]:
    """Return the main settings, and all others that are not the default, in one flat table."""
    defaults = {name: default for name, default, _ in describe_settings()}
    method = settings.method_class
    defaults |= {f"{method.section}.{k}": f.default for k, f in method.hyperparameters().items()}
    table = flatten(settings.to_table())
    return {k: v for k, v in table.items() if k in MAIN or write(v) != write(defaults[k])}


class _Session:
    """One training, tied to its run folder."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        objective: Objective | None,
        group: Group | None = None,
    ) -> None:
        self.run, self.group = run, group
        self.device = own_device(group, settings.device)
        self.data = data.load_dataset(
            settings.data, Path(settings.data_dir) if settings.data_dir else None
        )
        if settings.train_samples is not None:
            self.data = self.data.subset(n_train=settings.train_samples)
        given = {k: getattr(settings, k) for k in NETWORK_ARGUMENTS}
        arguments = nets.find(settings.net).resolve(
            {k: v for k, v in given.items() if v is not None}
        )
        normalize = data.is_normalized(settings.data)
        self.settings = settings.resolve(normalize=normalize, network=arguments)
        self.architecture = nets.Architecture(
            settings.net,
            self.data.input_shape,
            self.data.num_classes,
            self._statistics() if self.settings.normalize else None,
            arguments,
        )
        self.settings, teacher = load_teacher(self.settings, self.architecture)
        with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU
            torch.manual_seed(self.settings.seed)
            self.trainer = Trainer(
                self.architecture.build(),
                self.data.input_shape,
                self.settings,
                objective or self.settings.objective(),
                self.device,
                group,
                teacher,
            )
        self.split = self.data.split(self.settings.validation, self.settings.seed)
        if len(self.split.train) < 2 and self.trainer.has_batchnorm:
            raise UserError("BatchNorm needs at least two training samples besides the validation")
        if group is not None:
            group.check_batch(self.batch_size, self.settings.accumulate)
        self.history: list[dict[str, Any]] = []

    def _statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and the deviation of the data; one of them for some networks."""
        mean, std = tuple(self.data.mean), tuple(self.data.std)
        uniform = nets.find(self.settings.net).uniform
        return mean, (sum(std) / len(std),) if uniform else std

    @property
    def batch_size(self) -> int:
        """Samples per step: small data is one batch."""
        return min(self.settings.batch_size, len(self.split.train))

    def begin(self) -> None:
        """Make the run folder; nothing is written before everything else has been checked."""
        self.run.clear()
        # Replaced last, and atomically: a full disk does not cost an earlier run its settings.
        write_text(self.run.config, self.settings.to_toml(self._made_with()))

    def _made_with(self) -> dict[str, Any]:
        """Return what the numbers of a run depend on besides its settings, and how to repeat it."""
        computed = {"device": str(self.device), "threads": torch.get_num_threads()}
        if self.group is not None:
            computed["processes"] = self.group.size
        command = shlex.join(train_arguments(chosen(self.settings)))
        return {**versions(), **computed, "command": command}

    def restore(self) -> None:
        """Continue where the checkpoint is."""
        checkpoint = first(self.group, lambda: load_checkpoint(self.run.checkpoint))
        try:
            self.trainer.restore(checkpoint)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.run.checkpoint} does not belong to the network in {self.run.config} "
                f"({str(error).splitlines()[0]})"
            ) from None
        history = first(self.group, self.run.history)
        self.history = [r for r in history if r["epoch"] < checkpoint.epoch]
        if len(self.history) != checkpoint.epoch:
            raise UserError(
                f"{self.run.history_file} does not belong to {self.run.checkpoint}; "
                "train again with --force"
            )

    def run_training(self, progress: Progress | None) -> None:
        """Train all epochs that are left."""
        first(self.group, self.run.tidy)
        # A last batch of one sample has no BatchNorm statistics.
        batches = self.data.training_batches(
            self.batch_size, indices=self.split.train, drop_last=True, device=self.device
        )
        if self.group is not None and not self.group.is_first:
            self.trainer.run(batches, self._validation())
            return
        log = _tensorboard(self.run.tensorboard)

        def on_epoch(trainer: Trainer, record: dict[str, Any], selected: bool) -> None:
            # The checkpoint comes last: a kill before it repeats the epoch, to the same end.
            self.history.append({**record, MADE_WITH: versions()})
            self.run.write_history(self.history)
            if selected:
                nets.save(trainer.module, self.architecture, self.run.folder)
            save_checkpoint(trainer.checkpoint(), self.run.checkpoint)
            log(record)

        self.trainer.run(batches, self._validation(), progress=progress, on_epoch=on_epoch)

    def _validation(self) -> data.Batches | None:
        if self.settings.select == "test":
            return self.data.test_batches(EVALUATION_BATCH, device=self.device)
        if not len(self.split.validation):
            return None
        return self.data.validation_batches(
            EVALUATION_BATCH, self.split.validation, device=self.device
        )


def _tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    """Return a function that logs an epoch to TensorBoard, if that is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return lambda record: None
    writer = SummaryWriter(str(folder))

    def log(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float):
                writer.add_scalar(name, value, record["epoch"])
        writer.flush()

    return log
