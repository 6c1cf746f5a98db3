"""Samples for the gallery of a report: which ones, and their pictures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tightrope.errors import UserError
from tightrope.page.content import Exhibit, Gallery, Sample
from tightrope.page.overview import radius_value
from tightrope.page.pictures import is_picture, picture, signed_picture
from tightrope.runs import Run
from tightrope.runs.examination import Dataset, load_data, load_samples

# How many samples of each kind are shown.
SHOWN = 12
OTHER_DATA = "The pictures are missing: the samples certified are of another data set."


class Pictures:
    """Makes galleries; data sets are loaded once, however many runs share them."""

    def __init__(self) -> None:
        self._datasets: dict[tuple[str, str | None], Dataset | str] = {}

    def gallery(
        self,
        run: Run,
        settings: Mapping[str, Any],
        samples: Sequence[Sample],
        module: nn.Module | None,
        eps: Any,
    ) -> Gallery:
        """Return the samples to show of a run."""
        falsified, hardest = choose(samples)
        if not falsified and not hardest:
            return Gallery()
        loaded = self._load(settings)
        dataset, problem = None, None
        if isinstance(loaded, str):
            problem = f"The pictures are missing, because the data set is: {loaded}"
        elif not _same(loaded, samples):
            problem = OTHER_DATA
        else:
            dataset = loaded
            if not is_picture(dataset.input_shape):
                problem = f"The samples are not images: their shape is {dataset.input_shape}."
        scene = _Scene(run, dataset, module, radius_value(None if eps is None else str(eps)))
        return Gallery(
            tuple(scene.falsified(sample) for sample in falsified),
            tuple(scene.plain(sample) for sample in hardest),
            problem,
        )

    def _load(self, settings: Mapping[str, Any]) -> Dataset | str:
        """Return the data set that the settings name, or why there is none."""
        name, where = settings.get("data"), settings.get("data_dir")
        if not isinstance(name, str):
            return "the settings do not name it"
        place = where if isinstance(where, str) and where.lower() != "none" else None
        if (name, place) not in self._datasets:
            try:
                loaded: Dataset | str = (
                    load_samples(name, settings.get("shape"))
                    if "network" in settings
                    else load_data(name, place)
                )
            except UserError as error:
                loaded = str(error)
            except OSError as error:
                loaded = f"{error.strerror or error}: {error.filename or name}"
            self._datasets[name, place] = loaded
        return self._datasets[name, place]


def choose(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Return the most clearly falsified samples, and the verified ones with least margin.

    Samples that are misclassified as they are teach less than counterexamples: they come last.
    """

    def margin(sample: Sample) -> float:
        return math.inf if sample.margin is None else sample.margin

    falsified = [s for s in samples if s.verdict == "falsified"]
    falsified.sort(key=lambda s: (s.counterexample is None, margin(s), s.index))
    verified = [s for s in samples if s.verdict == "verified" and s.margin is not None]
    verified.sort(key=lambda s: (margin(s), s.index))
    return falsified[:SHOWN], verified[:SHOWN]


def _same(dataset: Dataset, samples: Sequence[Sample]) -> bool:
    """Return whether samples are those of a data set, as far as their records tell."""
    labels = dataset.y_test.tolist()
    inside = all(0 <= s.index < len(labels) and labels[s.index] == s.label for s in samples)
    known = {s.index: s.fingerprint for s in samples if s.fingerprint is not None}
    return inside and dataset.changed_sample(known) is None


class _Scene:
    """A run with what its pictures need."""

    def __init__(
        self,
        run: Run,
        dataset: Dataset | None,
        module: nn.Module | None,
        radius: float | None,
    ) -> None:
        self.run, self.dataset, self.module, self.radius = run, dataset, module, radius

    def plain(self, sample: Sample) -> Exhibit:
        """Show the sample itself."""
        original = self._original(sample)
        return Exhibit(
            sample,
            self._name(sample.label),
            self._name(sample.prediction),
            original=None if original is None else _shown(original),
        )

    def falsified(self, sample: Sample) -> Exhibit:
        """Show a sample with its counterexample, if there is one."""
        exhibit = self.plain(sample)
        original, point = self._original(sample), self._counterexample(sample)
        if original is None or point is None or point.shape != original.shape:
            return exhibit
        change = point.astype(np.float64) - original
        size = float(np.abs(change).max())
        seen = is_picture(point.shape)
        return Exhibit(
            sample,
            exhibit.label,
            exhibit.prediction,
            original=exhibit.original,
            perturbation=signed_picture(change, self.radius or size) if seen else None,
            adversarial=_shown(point),
            alias=self._alias(point, sample.label),
            size=size,
        )

    def _original(self, sample: Sample) -> np.ndarray | None:
        if self.dataset is None:
            return None
        pixels: np.ndarray = self.dataset.test_inputs(torch.tensor([sample.index]))[0].numpy()
        return pixels

    def _counterexample(self, sample: Sample) -> np.ndarray | None:
        """Read a counterexample; names that lead elsewhere are not followed."""
        path = self.run.folder / (sample.counterexample or "")
        if path.parent != self.run.counterexamples or path.suffix != ".npy":
            return None
        if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
            return None
        try:
            with warnings.catch_warnings():  # numpy warns of headers that are merely strange
                warnings.simplefilter("ignore")
                # Mapped, so that a header that promises gigabytes costs nothing.
                point = np.load(path, mmap_mode="r", allow_pickle=False)
            expected = None if self.dataset is None else self.dataset.input_shape
            if point.shape != expected or point.dtype.kind != "f":
                return None
            values = np.array(point, dtype=np.float32)
        except Exception:  # a damaged header makes numpy raise errors of any kind
            return None
        return values if np.isfinite(values).all() else None

    def _alias(self, point: np.ndarray, label: int) -> str | None:
        """Return the class that the network prefers to the label there."""
        if self.module is None:
            return None
        try:
            with torch.no_grad():
                outputs = self.module(torch.from_numpy(point)[None])[0].clone()
        except RuntimeError:
            return None  # the network takes other shapes
        if not torch.isfinite(outputs).all() or not 0 <= label < len(outputs):
            return None
        outputs[label] = -math.inf
        return self._name(int(outputs.argmax()))

    def _name(self, label: int) -> str:
        classes = () if self.dataset is None else self.dataset.classes
        return classes[label] if 0 <= label < len(classes) else str(label)


def _shown(pixels: np.ndarray) -> str | None:
    return picture(pixels) if is_picture(pixels.shape) else None
