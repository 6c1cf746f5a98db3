"""The variables and networks that a VNN-LIB file declares.

In version 1 each input `X_0` and output `Y_0` is declared by itself; in version 2 networks have
named tensors of inputs and outputs. Either way all inputs of a file are numbered from 0 on, in
the order of their declarations (elements of a tensor in row-major order), and so are all outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tightrope.certification.vnnlib.text import Variable, parse_indexed
from tightrope.errors import UserError
from tightrope.limits import VNNLIB_BOUNDS


class Tensor(NamedTuple):
    """A tensor of inputs (`kind` X) or outputs (Y), whose elements begin at number `first`."""

    name: str
    kind: str
    type: str
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def number(self, index: tuple[int, ...]) -> int | None:
        """Return the number of an element, if there is such an element."""
        if self.shape == () and index == (0,):
            return self.first
        if len(index) != len(self.shape):
            return None
        place = 0
        for i, length in zip(index, self.shape, strict=True):
            if i >= length:
                return None
            place = place * length + i
        return self.first + place


@dataclass
class DeclaredNetwork:
    """A network of a file; `same_as` is the one that it is equal to, if that is declared."""

    name: str
    tensors: list[Tensor] = field(default_factory=list)
    same_as: str | None = None
    like: str | None = None  # the one that has the same layers, with other weights

    def span(self, kind: str) -> slice:
        """Return the numbers of the inputs (X) or outputs (Y) of this network."""
        mine = [tensor for tensor in self.tensors if tensor.kind == kind]
        first = mine[0].first if mine else 0
        return slice(first, first + sum(tensor.size for tensor in mine))


@dataclass
class Names:
    """What a file declares."""

    known: dict[str, Variable] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    networks: list[DeclaredNetwork] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=lambda: {"X": 0, "Y": 0})

    def declare(self, name: str, kind: str, type_: str, shape: tuple[int, ...]) -> Tensor:
        """Declare a tensor."""
        tensor = Tensor(name, kind, type_, shape, self.sizes[kind])
        if not tensor.size:
            raise UserError(f"{name} has no elements")
        VNNLIB_BOUNDS.check(self.sizes[kind] + tensor.size, f"the size of {name}")
        self.sizes[kind] += tensor.size
        self.tensors[name] = tensor
        return tensor

    def find(self, word: str) -> Variable | None:
        """Return the variable that a word stands for."""
        variable = self.known.get(word)
        if variable is not None or not self.tensors:
            return variable
        name, index = parse_indexed(word) or (word, ())
        tensor = self.tensors.get(name)
        number = None if tensor is None else tensor.number(index)
        if tensor is None or number is None:
            return None
        self.known[word] = Variable(tensor.kind, number)
        return self.known[word]

    def count(self, kind: str) -> int:
        """Return the number of inputs or outputs, which must be numbered without gaps."""
        if self.tensors:
            return self.sizes[kind]
        indices = {variable.number for variable in self.known.values() if variable.kind == kind}
        if not indices:
            raise UserError(f"no variable {kind}_0 is declared")
        for index in range(len(indices)):
            if index not in indices:
                raise UserError(f"{kind}_{index} is not declared, though {kind}_{max(indices)} is")
        return len(indices)

    def title(self, kind: str, number: int) -> str:
        """Return how the file calls a variable."""
        for tensor in self.tensors.values():
            place = number - tensor.first
            if tensor.kind == kind and 0 <= place < tensor.size:
                index = []
                for length in reversed(tensor.shape):
                    place, last = divmod(place, length)
                    index.append(str(last))
                return f"{tensor.name}[{','.join(reversed(index))}]"
        return f"{kind}_{number}"
