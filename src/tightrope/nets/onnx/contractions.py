"""`Einsum` of ONNX: sums of products by letters, of values and constants."""

from __future__ import annotations

from tightrope.graph import contractions
from tightrope.graph.contractions import Operand
from tightrope.graph.values import refuse
from tightrope.nets.onnx import dimensions
from tightrope.nets.onnx.builder import Array, Builder, Call, Converter, Value


def _operand(build: Builder, given: Value | Array, letters: str) -> Operand:
    if isinstance(given, Value):
        return Operand(build.at(given, given.shape), letters, given.shape)
    return Operand(build.tensor(given), letters, given.shape)


def matrix_products(build: Builder, a: Value | Array, b: Value | Array) -> Value:
    """Products of matrices of which one side is several constants; leading dimensions broadcast."""
    shape = dimensions.product(a.shape, b.shape)
    ends = ("i" if len(a.shape) > 1 else "") + "j", "j" + ("k" if len(b.shape) > 1 else "")
    operands, found = [], ""
    for given, end in zip((a, b), ends, strict=True):
        leading = given.shape[: len(given.shape) - len(end)]
        letters = "abcdefgh"[8 - len(leading) :]
        refuse(len(letters) != len(leading), f"{len(given.shape)} dimensions")
        # What is repeated has no letter.
        kept = [(c, size) for c, size in zip(letters, leading, strict=True) if size > 1]
        own = "".join(c for c, _ in kept) + end
        sizes = (*(size for _, size in kept), *given.shape[len(leading) :])
        if isinstance(given, Value):
            operands.append(Operand(build.at(given, sizes), own, sizes))
        else:
            operands.append(Operand(build.tensor(given).reshape(sizes), own, sizes))
        found += "".join(c for c in own if c in letters and c not in found)
    out = "".join(sorted(found)) + ends[0].replace("j", "") + ends[1].replace("j", "")
    return build.place(contractions.einsum(build, operands, out), shape)


def _einsum(build: Builder, call: Call) -> Value:
    given = [a for a in call.inputs if a is not None]
    ranks = [len(a.shape) for a in given]
    refuse(min(ranks) == 0, "a number among its operands")
    letters, out = contractions.letters_of(str(call.attributes["equation"]), ranks)
    sizes: dict[str, int] = {}
    for own, a in zip(letters, given, strict=True):
        for letter, size in zip(own, a.shape, strict=True):
            refuse(sizes.setdefault(letter, size) != size, f"sizes of {letter!r} that differ")
    work = 1
    for size in sizes.values():
        work *= size
    build.sizes.multiply(work, build.name)
    shape = tuple(sizes[letter] for letter in out)
    dimensions.check_rank(shape)
    operands = [_operand(build, a, own) for a, own in zip(given, letters, strict=True)]
    position = contractions.einsum(build, operands, out)
    return build.place(position, shape)


CONVERTERS: dict[str, Converter] = {"Einsum": _einsum}
