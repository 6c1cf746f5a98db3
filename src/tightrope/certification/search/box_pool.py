"""The pool of open boxes of a search over the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tightrope.certification.search.clipping import Boxes, join_boxes


class BoxPool:
    """Open boxes and the bounds that they inherited."""

    def __init__(self, boxes: Boxes, bound: Tensor) -> None:
        self.boxes, self.bound = boxes, bound

    def __len__(self) -> int:
        return len(self.bound)

    @property
    def bytes(self) -> int:
        """Memory of the boxes."""
        return sum(t.nbytes for t in vars(self.boxes).values())

    @property
    def lowest(self) -> float:
        """The lowest bound."""
        return float(self.bound.min())

    def take(self, most: int, *, deep: bool) -> Boxes:
        """Take out those with the lowest bounds, or `deep`, those that are nearly proved."""
        chosen = self.bound.topk(min(most, len(self)), largest=deep).indices
        taken = self.boxes[chosen]
        rest = torch.ones_like(self.bound, dtype=torch.bool)
        rest[chosen] = False
        self.boxes, self.bound = self.boxes[rest], self.bound[rest]
        return taken

    def add(self, boxes: Boxes, bound: Tensor) -> None:
        """Put boxes in."""
        self.boxes = join_boxes([self.boxes, boxes])
        self.bound = torch.cat((self.bound, bound))
