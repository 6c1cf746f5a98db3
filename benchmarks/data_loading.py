"""How much faster batched augmentation is than transforming one image after the other.

    python benchmarks/data_loading.py [--batch 128] [--images 4096] [--threads 1]

Both sides flip and crop the same random uint8 images with edge padding, convert them to float
and stack them into batches, in one process and in turns, so that a busy machine slows both.

One thread is the default because single images are too small for more to be used. With several
threads on cores that others keep busy, the batched side mostly waits at thread barriers: on two
such cores a batch took 40 ms instead of 4, which says nothing about the work itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from tightrope.waiting import sleep_while_waiting

sleep_while_waiting()  # before torch is loaded

import torch
import torch.nn.functional as F
from torch import Tensor

from tightrope.data import Augmentation, Batches

CASES = {
    "CIFAR-10 (32, padding 2)": (32, Augmentation(flip=True, crop=32, padding=2)),
    "TinyImageNet (56 of 64)": (64, Augmentation(flip=True, crop=56)),
    "TinyImageNet-64 (padding 4)": (64, Augmentation(flip=True, crop=64, padding=4)),
}


def one_by_one(images: Tensor, batch_size: int, augment: Augmentation) -> Iterator[Tensor]:
    """Do what `Batches` does, by transforms of single images."""
    crop, padding = augment.crop or images.shape[-1], augment.padding
    room = images.shape[-1] + 2 * padding - crop + 1
    for chosen in torch.randperm(len(images)).split(batch_size):
        batch = []
        for index in chosen.tolist():
            image = images[index].float().div(255)
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            if padding:
                image = F.pad(image, (padding,) * 4, mode="replicate")
            top, left = torch.randint(0, room, (2,)).tolist()
            batch.append(image[:, top : top + crop, left : left + crop])
        yield torch.stack(batch)


def seconds(batches: Iterator[object]) -> float:
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"batches of {arguments.batch}, {arguments.threads} thread(s)")
    for name, (size, augment) in CASES.items():
        images = torch.randint(0, 256, (arguments.images, 3, size, size), dtype=torch.uint8)
        labels = torch.zeros(len(images), dtype=torch.int64)
        batched = Batches(images, labels, arguments.batch, training=True, augment=augment)
        fast, slow = [], []
        for _ in range(arguments.repeats):
            fast.append(seconds(iter(batched)))
            slow.append(seconds(one_by_one(images, arguments.batch, augment)))
        rate = [len(images) / min(times) for times in (fast, slow)]
        print(
            f"{name:28} batched {rate[0]:9,.0f} images/s   one by one {rate[1]:8,.0f} images/s   "
            f"{rate[0] / rate[1]:5.1f} times faster"
        )


if __name__ == "__main__":
    main()
