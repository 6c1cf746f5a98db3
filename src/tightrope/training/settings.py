"""All settings of a training run: one flat, typed set.

A setting left at None is derived from the others by `resolve`, so that a short command gets
sensible values and `config.toml` shows every one of them. What the settings are is known without
torch; the methods, which need it, are imported where their own options are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import tomli_w

from tightrope.errors import UserError, shorten, unknown_name
from tightrope.radius import format_radius, parse_radius
from tightrope.reading import MADE_WITH
from tightrope.reading import flatten as flatten
from tightrope.training import parsing
from tightrope.training.parsing import parse_setting, setting

if TYPE_CHECKING:
    from tightrope.runs import Run
    from tightrope.training.objectives import Objective

_count = parsing.optional(parsing.whole(1))
WITHOUT_BALL = ("standard", "noise")
_LARGEST = 1e30  # optimisers count in single precision


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run; `options` are the method's own hyperparameters.

    `own_method` is the class of a method that is not in the table.
    """

    data: str = setting("mnist", parsing.text, "data set: a name, an .npz file or an image folder")
    data_dir: str | None = setting(None, parsing.optional(parsing.text), "where data sets lie")
    train_samples: int | None = setting(None, _count, "use only the first training samples")
    validation: float | int = setting(
        0.1, parsing.part_of_data, "held-out part of the training set: fraction or count"
    )
    net: str = setting("cnn3", parsing.text, "architecture, see `tightrope nets`")
    width: int | None = setting(None, _count, "channels of the first layer")
    hidden: int | None = setting(None, _count, "neurons of the hidden linear layer")
    depth: int | None = setting(None, _count, "hidden layers of `mlp`, all of distance nets")
    keep: int | None = setting(None, _count, "inputs that `sortnet` keeps in training, in percent")
    blocks: int | None = setting(None, _count, "blocks of `resnet`")
    batch_norm: bool | None = setting(None, parsing.optional(parsing.flag), "use BatchNorm")
    normalize: bool | None = setting(
        None, parsing.optional(parsing.flag), "normalise inputs by the data's mean and deviation"
    )
    initialization: str | None = setting(
        None,
        parsing.optional(parsing.choice("shi", "default", "teacher", "identity")),
        "shi, default (the layers' own), teacher (its weights) or identity (of distance layers)",
    )
    method: str = setting("ibp", parsing.text, "training method, see `tightrope methods`")
    teacher: str | None = setting(
        None, parsing.optional(parsing.folder), "run to learn from, for methods that distil"
    )
    teacher_weights: str | None = setting(
        None, parsing.optional(parsing.text), "fingerprint of the teacher, filled in"
    )
    eps: Fraction = setting(Fraction(1, 10), parse_radius, "radius to be robust to")
    train_eps: Fraction | None = setting(
        None, parsing.optional(lambda v: parse_radius(v, "train_eps")), "radius to train at"
    )
    epochs: int = setting(70, parsing.whole(1), "passes over the training set")
    warmup_epochs: int = setting(0, parsing.whole(0), "first epochs, at radius 0")
    annealing_epochs: int | None = setting(
        None, parsing.optional(parsing.whole(0)), "epochs over which the radius grows"
    )
    annealing: str = setting(
        "smooth", parsing.choice("smooth", "linear", "constant"), "how the radius grows"
    )
    annealing_middle: float = setting(
        0.25,
        parsing.number(0, maximum=1),
        "part of a smooth ramp that is curved; then it is a line",
    )
    batch_size: int = setting(256, parsing.whole(2), "samples per optimiser step")
    accumulate: int = setting(1, parsing.whole(1), "parts a batch is computed in, to save memory")
    optimizer: str = setting(
        "adam", parsing.choice("adam", "adamw", "radam", "sgd"), "adam, adamw, radam or sgd"
    )
    learning_rate: float = setting(
        5e-4, parsing.number(0, strict=True, maximum=_LARGEST), "first learning rate"
    )
    momentum: float = setting(0.9, parsing.number(0, maximum=1), "momentum of sgd")
    weight_decay: float = setting(
        0.0, parsing.number(0, maximum=_LARGEST), "weight decay of the optimiser"
    )
    beta2: float = setting(
        0.999, parsing.number(0, maximum=1), "decay of squared gradients in Adam's family"
    )
    optimizer_eps: float = setting(
        1e-8, parsing.number(0, strict=True, maximum=1), "least denominator in Adam's family"
    )
    decay: str = setting(
        "steps", parsing.choice("steps", "cosine"), "how the rate falls: in steps, or to zero"
    )
    decay_epochs: tuple[int, ...] | None = setting(
        None, parsing.optional(parsing.increasing), "epochs (of a stage) at which the rate drops"
    )
    decay_factor: float = setting(0.2, parsing.number(0, strict=True), "factor of each drop")
    clip: float | None = setting(
        10.0, parsing.optional(parsing.number(0, strict=True)), "largest gradient norm"
    )
    l1: float = setting(0.0, parsing.number(0), "weight of the L1 norm of the weights")
    regularizer_weight: float = setting(
        0.5, parsing.number(0), "weight of Shi et al.'s regularisers during annealing"
    )
    natural_weight: float = setting(
        0.0, parsing.number(0, maximum=1), "share of the clean loss in the loss"
    )
    precise_bn: bool = setting(False, parsing.flag, "recompute BatchNorm statistics each epoch")
    average_from: int | None = setting(
        None, parsing.optional(parsing.whole(0)), "epoch from which weights are averaged"
    )
    average_decay: float | None = setting(
        None,
        parsing.optional(parsing.fraction),
        "decay of an exponential average, instead of plain",
    )
    smoothing: str | None = setting(
        None,
        parsing.optional(parsing.choice("rgs", "pgpe")),
        "gradients over Gaussian weights: rgs (of gradients) or pgpe (of losses)",
    )
    smoothing_sigma: float = setting(
        0.01, parsing.number(0, strict=True), "deviation of the weights that smoothing draws"
    )
    smoothing_pairs: int = setting(
        8, parsing.whole(1, 10_000), "antithetic pairs that smoothing draws"
    )
    sam_rho: float = setting(
        0.0, parsing.number(0), "step uphill of sharpness-aware minimisation, per tensor"
    )
    edac_weight: float = setting(
        0.0, parsing.number(0), "weight of EDAC's step towards less adversarial certainty"
    )
    tightness_weight: float = setting(
        0.0, parsing.number(0), "weight of what intervals lose in propagation"
    )
    select: str = setting(
        "best", parsing.choice("best", "last", "test"), "which epoch's weights to keep"
    )
    seed: int = setting(0, parsing.whole(0, 2**63 - 1), "seed of everything random")
    device: str = setting("auto", parsing.text, "cpu, cuda, cuda:1, mps or auto")
    search_precision: str = setting(
        "full", parsing.choice("full", "tf32", "bf16"), "of attacks while they search"
    )
    deterministic: bool = setting(False, parsing.flag, "only algorithms that repeat their results")
    options: Mapping[str, Any] = field(default_factory=dict)
    own_method: type[Objective] | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any], own_method: type[Objective] | None = None) -> Settings:
        """Make settings from text or typed values; `method.option` names the method's own."""
        from tightrope.training.objectives import find_method

        declared = {f.name: f for f in _fields()}
        wanted = given.get("method", "ibp")
        if not isinstance(wanted, str):
            raise UserError(f"method must be a name, got {shorten(wanted)}")
        if own_method is not None and own_method.name != wanted:
            own_method = None
        method = own_method or find_method(wanted)
        options = {f"{method.section}.{k}": f for k, f in method.hyperparameters().items()}
        values: dict[str, Any] = {}
        chosen: dict[str, Any] = {}
        for name, value in given.items():
            if name in declared:
                values[name] = parse_setting(name, declared[name], value)
            elif name in options:
                chosen[options[name].name] = parse_setting(name, options[name], value)
            else:
                raise _unknown_setting(name, method, [*declared, *options])
        # The method may refuse its options, and completes them.
        chosen = dataclasses.asdict(method(**chosen))  # type: ignore[call-overload]
        return cls(**values, options=chosen, own_method=own_method)

    @property
    def method_class(self) -> type[Objective]:
        """The class of the training method."""
        from tightrope.training.objectives import find_method

        return self.own_method or find_method(self.method)

    def objective(self) -> Any:
        """Return the training method with its hyperparameters."""
        return self.method_class(**self.options)

    def resolve(self, *, normalize: bool, network: Mapping[str, Any]) -> Settings:
        """Fill in everything that was left open.

        `normalize` is the data set's default, `network` are the architecture's arguments.
        """
        each = self.epochs // (len(self.objective().stages) or 1)
        bounds = self.method_class.propagates_boxes
        share = self.method_class.annealing_share
        share = (2 / 7 if bounds else 0.0) if share is None else share
        derived = {
            **network,
            "normalize": normalize,
            "initialization": "shi" if bounds else "default",
            "train_eps": self.eps,
            "annealing_epochs": round(self.epochs * share),
            "decay_epochs": tuple(sorted({round(each * n / 7) for n in (5, 6)} - {0})),
        }
        missing = {k: v for k, v in derived.items() if getattr(self, k) is None}
        resolved = dataclasses.replace(self, **missing)
        resolved.check()
        return resolved

    def check(self) -> None:
        """Refuse combinations that make no sense."""
        assert self.annealing_epochs is not None
        ramp = self.warmup_epochs + self.annealing_epochs
        if ramp >= self.epochs:
            raise UserError(
                f"warmup_epochs + annealing_epochs = {ramp} must be below epochs = {self.epochs}: "
                "no epoch would train at the full radius"
            )
        if self.select == "best" and not self.validation:
            raise UserError("select = best needs held-out data: set validation, or select = last")
        if self.accumulate > self.batch_size:
            raise UserError("accumulate must not exceed batch_size")
        self._check_helpers()
        if stages := len(self.objective().stages):
            self._check_stages(stages, ramp)
        self._check_distances()

    def _check_helpers(self) -> None:
        """Refuse helpers that do not go together, or with the method."""
        if self.average_from is not None and self.select != "last":
            raise UserError("average_from averages over epochs: set select = last")
        if self.average_from is not None and self.average_from >= self.epochs:
            raise UserError(f"average_from must be below epochs = {self.epochs}")
        if self.average_decay is not None and self.average_from is None:
            raise UserError("average_decay needs average_from: the epoch from which to average")
        if self.smoothing is not None and self.sam_rho:
            raise UserError("smoothing and sam_rho both move the weights: set one of them")
        for f in _fields():
            idle = self.smoothing is None and f.name in ("smoothing_sigma", "smoothing_pairs")
            if idle and getattr(self, f.name) != f.default:
                raise UserError(f"{f.name} says nothing without smoothing: set that to rgs or pgpe")
        if self.edac_weight and self.method in WITHOUT_BALL:
            raise UserError(
                f"edac_weight is about attacks in the ball, which method {self.method!r} does not "
                "train on: leave it at 0"
            )

    def _check_distances(self) -> None:
        """Refuse what is for distance layers only, and what is not for them."""
        if not self.method_class.trains_distances:
            if self.initialization == "identity":
                raise UserError("initialization = identity is for distance layers (sortnet) only")
            return
        if self.initialization == "shi":
            raise UserError(f"initialization = shi is for ReLUs: {self.method} takes identity")
        for name in ("smoothing", "sam_rho", "edac_weight"):
            if getattr(self, name):
                raise UserError(
                    f"{name} goes through a batch more than once, and {self.method} draws other "
                    "inputs each time: leave it out"
                )

    def _check_stages(self, stages: int, ramp: int) -> None:
        """Refuse what does not go with stages, each at one radius."""
        if self.epochs < stages:
            raise UserError(
                f"epochs = {self.epochs} must be at least {stages}: {self.method} trains in "
                f"{stages} stages"
            )
        if ramp:
            raise UserError(
                f"{self.method} trains each stage at one radius: "
                "set warmup_epochs = 0 and annealing_epochs = 0"
            )
        last = (stages - 1) * (self.epochs // stages)
        if self.average_from is not None and self.average_from < last:
            raise UserError(f"average_from must be in the last stage, {last} or later")

    def to_table(self) -> dict[str, Any]:
        """Return the content of `config.toml`: settings in use, the method's under its name."""
        table: dict[str, Any] = {}
        for f in _fields():
            value = getattr(self, f.name)
            if isinstance(value, Fraction):
                text = format_radius(value)
                value = text if "/" in text else float(text)
            if value is None and f.default is not None:
                value = "none"  # TOML has no null, and leaving it out would mean the default
            if value is not None:
                table[f.name] = _plain(value)
        declared = self.method_class.hyperparameters()
        options = {
            name: "none" if value is None else _plain(value)
            for name, value in self.options.items()
            if value is not None or declared[name].default is not None
        }
        return {**table, self.method_class.section: options} if options else table

    def to_toml(self, made_with: Mapping[str, Any] | None = None) -> str:
        """Return the text of `config.toml`; what the run is made with is no setting."""
        return tomli_w.dumps(self.to_table() | ({MADE_WITH: made_with} if made_with else {}))


def _fields() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(Settings) if f.name not in ("options", "own_method")]


def _plain(value: Any) -> Any:
    """Return a value as TOML has it."""
    return list(value) if isinstance(value, tuple) else value


def _unknown_setting(name: str, method: type[Objective], known: list[str]) -> UserError:
    from tightrope.training.objectives import METHODS, section

    head, dot, _ = name.partition(".")
    owners = {section(other): other for other in METHODS}
    if dot and owners.get(head, method.name) != method.name:
        owner = owners[head]
        return UserError(f"{name} belongs to method {owner!r}, but the method is {method.name!r}")
    if dot and head == method.section:
        own = [k for k in known if k.startswith(f"{head}.")]
        if not own:
            return UserError(f"method {method.name!r} takes no options, got {shorten(name)}")
        return unknown_name("setting", name, own)
    return unknown_name("setting", name, known)


def describe_settings() -> list[tuple[str, Any, str]]:
    """Return name, default and meaning of every setting."""
    return [(f.name, f.default, f.metadata["help"]) for f in _fields()]


def stored_settings(run: Run) -> Settings:
    """Return the settings of a run, each of them checked."""
    stored = run.values()
    try:
        return Settings.parse(stored)
    except UserError as error:
        raise UserError(f"{run.config}: {error}") from None
