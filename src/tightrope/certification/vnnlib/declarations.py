"""Declarations of VNN-LIB: variables of version 1, networks with their tensors of version 2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tightrope.certification.vnnlib.brackets import Brackets, Empty, Words
from tightrope.certification.vnnlib.names import DeclaredNetwork
from tightrope.certification.vnnlib.text import is_name, parse_indexed, parse_variable
from tightrope.errors import UserError, shorten

if TYPE_CHECKING:
    from tightrope.certification.vnnlib.syntax import File

KINDS = {"declare-input": "X", "declare-output": "Y"}
RELATIONS = ("equal-to", "isomorphic-to")
TYPES = ("real", "float32", "float64")
_VERSION = re.compile(r"<2\.\d{1,3}>")


class Version(Words):
    """`(vnnlib-version <2.0>)`."""

    def __init__(self, file: File, position: int) -> None:
        shown = file.source.show(position)
        message = f"expected (vnnlib-version <2.0>), got {shown}"
        super().__init__(file.source.error(position, message), position)

    def close(self, outer: Brackets) -> None:
        """Refuse other versions than those of 2."""
        if len(self.words) != 1 or not _VERSION.fullmatch(self.words[0]):
            raise self.error


class Declaration:
    """`(declare-const X_0 Real)` or `(declare-fun X_0 () Real)`."""

    def __init__(self, file: File, position: int) -> None:
        self.file, self.position = file, position
        self.words: list[str] = []

    def open(self, head: str, position: int) -> Brackets:
        """Allow empty brackets, those of a function without arguments."""
        if head:
            raise self._wrong()
        return Empty(self._wrong(), position)

    def word(self, word: str, position: int) -> None:
        """Read the name or the type."""
        if len(self.words) == 2:
            raise self._wrong()
        self.words.append(word)

    def close(self, outer: Brackets) -> None:
        """Declare the variable."""
        names, source = self.file.names, self.file.source
        variable = parse_variable(self.words[0]) if self.words else None
        if variable is None or self.words[1:] != ["Real"]:
            raise self._wrong()
        if self.words[0] in names.known:
            raise source.error(self.position, f"{self.words[0]} is declared twice")
        if names.networks:
            raise source.error(self.position, "a variable beside declared networks")
        names.known[self.words[0]] = variable

    def _wrong(self) -> UserError:
        shown = self.file.source.show(self.position)
        message = f"expected (declare-const X_0 Real), got {shown}"
        return self.file.source.error(self.position, message)


class Network:
    """`(declare-network f (equal-to g) (declare-input X real [5]) (declare-output Y real [5]))`."""

    def __init__(self, file: File, position: int) -> None:
        self.file, self.position = file, position
        self.network: DeclaredNetwork | None = None

    def open(self, head: str, position: int) -> Brackets:
        """Begin a tensor or a relation to another network."""
        shown = self.file.source.show(position)
        if self.network is not None and head in KINDS:
            message = f"expected ({head} NAME TYPE [SHAPE]), got {shown}"
            return _Tensor(KINDS[head], self.file.source.error(position, message), position)
        if self.network is not None and head in RELATIONS:
            message = f"expected ({head} NETWORK), got {shown}"
            return _Relation(head, self.file.source.error(position, message), position)
        if head == "declare-hidden":
            raise self.file.source.error(position, "properties of hidden layers are not supported")
        raise self._wrong()

    def word(self, word: str, position: int) -> None:
        """Read the name."""
        if self.network is not None or not is_name(word):
            raise self._wrong()
        if any(network.name == word for network in self.file.names.networks):
            raise self.file.source.error(position, f"network {word} is declared twice")
        self.network = DeclaredNetwork(word)

    def close(self, outer: Brackets) -> None:
        """Declare the network."""
        network = self.network
        if network is None or {tensor.kind for tensor in network.tensors} != {"X", "Y"}:
            raise self._wrong()
        names = self.file.names
        if not names.networks and names.known:
            raise self.file.source.error(self.position, "a network beside declared variables")
        names.networks.append(network)

    def declare(self, kind: str, words: list[str], error: UserError) -> None:
        """Declare a tensor."""
        assert self.network is not None
        # The shape stands behind the type like an index.
        typed = parse_indexed(words[1]) if len(words) == 2 else None
        if typed is None or not is_name(words[0]) or 0 in typed[1]:
            raise error
        name, (type_, shape) = words[0], typed
        if type_.lower() not in TYPES:
            message = f"{name} is of type {shorten(type_)}; known are {', '.join(TYPES)}"
            raise self.file.source.error(self.position, message)
        if name in self.file.names.tensors:
            raise self.file.source.error(self.position, f"{name} is declared twice")
        try:
            self.network.tensors.append(self.file.names.declare(name, kind, type_, shape))
        except UserError as limit:
            raise self.file.source.error(self.position, str(limit)) from None

    def relate(self, relation: str, words: list[str], error: UserError) -> None:
        """Note which network this one is equal to, or like."""
        network = self.network
        assert network is not None
        others = {other.name: other for other in self.file.names.networks}
        if len(words) != 1 or words[0] not in others or network.same_as or network.like:
            raise error
        if relation == "equal-to":
            network.same_as = words[0]
        else:
            network.like = words[0]

    def _wrong(self) -> UserError:
        shown = self.file.source.show(self.position)
        message = f"expected (declare-network NAME (declare-input ...) ...), got {shown}"
        return self.file.source.error(self.position, message)


class _Tensor(Words):
    def __init__(self, kind: str, error: UserError, position: int) -> None:
        super().__init__(error, position)
        self.kind = kind

    def close(self, outer: Brackets) -> None:
        """Declare the tensor."""
        assert isinstance(outer, Network)
        outer.declare(self.kind, self.words, self.error)


class _Relation(Words):
    def __init__(self, relation: str, error: UserError, position: int) -> None:
        super().__init__(error, position)
        self.relation = relation

    def close(self, outer: Brackets) -> None:
        """Relate the networks."""
        assert isinstance(outer, Network)
        outer.relate(self.relation, self.words, self.error)
