"""The network under examination, in the forms that the stages need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from tightrope.allocation import reuse_freed_memory
from tightrope.answer import Answer, Verdict
from tightrope.attacks import Network, for_points
from tightrope.box import Box
from tightrope.budget import fitting, rows_at_once
from tightrope.devices import forked_random
from tightrope.domains.linear.rules import BY_INTERVALS
from tightrope.graph import Graph, trace
from tightrope.graph.halves import share_halves
from tightrope.graph.lowering import lowered, without_softmax
from tightrope.graph.maxpool import expand_max_pools
from tightrope.graph.work import products
from tightrope.precision import provable

ATTACK = 1 << 30  # bytes of what an attack computes at a time
COPIES = 4  # of all its numbers that a point needs on its way there and back
SHOWN = 5  # names of layers in a note
PASSES = 3  # that a step takes: one there, two back


class Subject:
    """A network: how it runs, and its graph.

    `run` is the network as its user runs it (a module, onnxruntime); whatever is said of
    counterexamples is what it says. The graph is what proofs are about.
    """

    def __init__(
        self,
        graph: Graph,
        run: Callable[[Tensor], Tensor],
    ) -> None:
        self.graph, self.run = graph, run
        self.input_shape = graph.input_shape

    @classmethod
    def of(cls, module: nn.Module, input_shape: tuple[int, ...], box: Box | None = None) -> Subject:
        """Examine a module, also at points of the box that will be asked about."""
        module = module.eval()
        # A module may overwrite its input.
        return cls(trace(module, input_shape, box=box, frozen=True), lambda x: module(x.clone()))

    def for_order(self) -> Subject:
        """Return the network for questions about the order of outputs: no softmax at its end."""
        graph = without_softmax(self.graph)
        return self if graph is self.graph else Subject(graph, self.run)

    def for_rows(self, matrix: Tensor, offset: Tensor) -> Subject:
        """Return the network for questions about the signs of rows `matrix @ output + offset`.

        A softmax at its end matters only if they ask for more than which of two outputs is larger;
        its logarithm only if they ask for more than differences.
        """
        pairs = (matrix != 0).sum(1) == 2
        balanced = torch.tensor([math.fsum(row) == 0 for row in matrix.tolist()])
        if bool((pairs.cpu() & balanced & (offset == 0).cpu()).all()):
            return self.for_order()
        graph = without_softmax(self.graph, logarithms_only=True)
        if graph is self.graph or not bool(balanced.all()):
            return self
        return Subject(graph, self.run)

    @cached_property
    def attacked(self) -> Network:
        """The network in its own precision without parameter gradients, for attacks."""
        return for_points(self.graph.fold_batchnorm())

    @cached_property
    def exact(self) -> Graph:
        """The network in float64, for proofs; max pools are made of ReLUs where they can be.

        BatchNorm is not folded: the rounding of folding would be outside the proof.
        """
        graph = share_halves(self.graph.detach().to(torch.float64))
        return lowered(expand_max_pools(graph), torch.float64)

    def note(self, answer: Answer) -> str:
        """Name the layers that only intervals bound, where nothing was decided."""
        names = [repr(n.name) for n in self.exact.nodes if isinstance(n.op, BY_INTERVALS)]
        if answer.verdict is not Verdict.UNKNOWN or not names:
            return ""
        shown = ", ".join(dict.fromkeys(names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
        return f"bounded by intervals alone, for want of a tighter rule: {shown}"

    @cached_property
    def device(self) -> torch.device:
        """Where the weights are."""
        seen = [torch.device("cpu")]

        def look(tensor: Tensor) -> Tensor:
            seen.append(tensor.device)
            return tensor

        self.graph.map_tensors(look)
        return seen[-1]

    @cached_property
    def neurons(self) -> int:
        """How many numbers are computed for one input."""
        return sum(math.prod(node.shape) for node in self.graph.nodes)

    @cached_property
    def work(self) -> int:
        """How many numbers are multiplied for one input."""
        return products(self.graph.nodes)

    @property
    def points_at_once(self) -> int:
        """How many points an attack may look at, with gradients, between two looks at the clock."""
        memory, each = fitting(ATTACK, self.device), COPIES * self.neurons
        return rows_at_once(memory, each * 4, PASSES * self.work)

    @cached_property
    def finite(self) -> bool:
        """Whether all weights are numbers; with others nothing can be proved."""
        seen = [True]

        def look(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and tensor.numel():
                # The ends of the numbers, which are none if one is: in one pass, without a copy.
                seen.append(all(bool(torch.isfinite(end)) for end in tensor.aminmax()))
            return tensor

        self.exact.map_tensors(look)
        return all(seen)

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Run the original network."""
        return self.run(x)

    def predict(self, x: Tensor) -> Tensor:
        """Return the predicted classes; an output that is not finite is no answer: -1."""
        logits = self.outputs(x)
        return torch.where(torch.isfinite(logits).all(1), logits.argmax(1), -1)

    def fooled(self, points: Tensor, labels: Tensor, candidates: Tensor) -> Tensor:
        """Return which candidates the network misclassifies when it sees them alone.

        In a batch, sums may be taken in another order and tip a margin near zero; a
        counterexample must hold for whoever feeds it to the network by itself.
        """
        confirmed = torch.zeros_like(candidates)
        for i in candidates.nonzero()[:, 0].tolist():
            confirmed[i] = self.predict(points[i : i + 1])[0] != labels[i]
        return confirmed


@contextmanager
def proving(subject: Subject) -> Iterator[None]:
    """Compute what is to be proved in full precision, with random numbers of one's own."""
    reuse_freed_memory()
    with forked_random(subject.device), provable():
        yield
