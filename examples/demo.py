"""From nothing to a certified network: the main job of Tightrope in one short script.

Trains a small convolutional network on MNIST with interval bounds, attacks it with PGD, proves
robustness of 1,000 test images, and draws what happened.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import tightrope as tr
from tightrope.cli.output import console, percent, print_table, training_bar
from tightrope.data import as_float, load_dataset

OUT = Path("runs/demo")
SAMPLES = 1000
EPS = 0.1


def main() -> None:
    """Train, attack, certify, report."""
    started = time.perf_counter()
    with training_bar(epochs=6) as bar:
        run = tr.train(preset="demo", out=OUT, force=True, progress=bar)
    trained = time.perf_counter()
    attacked = tr.attack(run, samples=SAMPLES, steps=40, restarts=1)
    result = tr.certify(run, samples=SAMPLES)
    assert result.adversarial is not None
    print_table(
        f"MNIST, eps {result.settings['eps']}, first {SAMPLES:,} test images",
        ("natural", "PGD-40", "strong attack", "certified", "training", "all"),
        [
            (
                percent(result.natural),
                percent(attacked.adversarial),
                percent(result.adversarial),
                percent(result.certified),
                f"{trained - started:.0f} s",
                f"{time.perf_counter() - started:.0f} s",
            )
        ],
    )
    console.print(
        f"proved for {result.verified} of {SAMPLES} images: "
        "no change of up to eps per pixel changes the prediction"
    )
    console.print(f"run folder: {run.folder}   picture: {draw(run)}")


def draw(run: tr.Run) -> Path:
    """Draw the training curves and a few counterexamples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    history = run.history()
    files = sorted(run.counterexamples.glob("*.npy"))[:4]
    layout = [["curve", *(f"{i}{j}" for j in range(4))] for i in "ab"]
    figure, axes = plt.subplot_mosaic(layout, figsize=(9, 3.2), width_ratios=(4.5, 1, 1, 1, 1))
    curve = axes["curve"]
    epochs = [record["epoch"] + 1 for record in history]
    for key, label in (("validation_natural", "natural"), ("validation_robust", "certified (IBP)")):
        curve.plot(epochs, [100 * record[key] for record in history], marker="o", label=label)
    annealed = [record["epoch"] + 1 for record in history if record["radius"] < EPS]
    curve.axvspan(1, max(annealed), alpha=0.1, label="radius grows")
    curve.set(xlabel="epoch", ylabel="held-out accuracy, %", title="training")
    curve.legend(loc="lower right")
    images, labels = load_dataset("mnist").x_test, load_dataset("mnist").y_test
    for row in "ab":
        for j in range(4):
            axes[f"{row}{j}"].axis("off")
    for j, file in enumerate(files):
        index = int(file.stem)
        axes[f"a{j}"].imshow(as_float(images[index, 0]), cmap="gray", vmin=0, vmax=1)
        axes[f"a{j}"].set_title(f"{int(labels[index])}", fontsize=9)
        axes[f"b{j}"].imshow(np.load(file, allow_pickle=False)[0], cmap="gray", vmin=0, vmax=1)
        axes[f"b{j}"].set_title("fooled", fontsize=9)
    path = run.folder / "figures" / "demo.png"
    path.parent.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    main()
