"""`tightrope.bounds`: lower and upper bounds on a network's outputs."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from tightrope.allocation import reuse_freed_memory
from tightrope.box import Box
from tightrope.certification.arguments import Network, check_network
from tightrope.certification.properties import PIXELS, Domain, parse_ball
from tightrope.certification.regions import corners
from tightrope.devices import launches
from tightrope.domains import interval, zonotope
from tightrope.domains.linear.bounded import Relaxation
from tightrope.domains.linear.coefficients import Coefficients
from tightrope.domains.linear.crown import ALPHA, CROWN, CROWN_IBP, best_bounds, relax
from tightrope.domains.linear.together import optimized_units
from tightrope.errors import UserError, shorten, unknown_name
from tightrope.graph import Graph, trace
from tightrope.graph.halves import share_halves
from tightrope.graph.lowering import lowered
from tightrope.graph.maxpool import expand_max_pools
from tightrope.nets.onnx.importing import OnnxNetwork
from tightrope.precision import ROUNDING, provable
from tightrope.radius import Radius

METHODS = ("ibp", "zonotope", "crown-ibp", "crown", "alpha")


def bounds(
    network: Network | str | Path,
    x: Tensor | Box,
    *,
    eps: Radius | Tensor | None = None,
    norm: float | str = math.inf,
    domain: Domain = PIXELS,
    method: str = "crown",
    node: str | None = None,
) -> Box:
    """Bound the outputs of a network, or of one of its layers, on a batch of inputs.

    `x` is a batch of inputs with a radius `eps` (or a tensor with one for each feature), or a `Box`
    of any corners. The ball is cut off at `domain`, the range of values that inputs can have at all
    (None: no cut), where `x` must lie; its `norm` is linf, l2 or l1 (ibp and zonotope bound the box
    around such a ball). `network` is a module, a graph or the path of an ONNX file.
    `method` is one of ibp, zonotope, crown-ibp, crown and alpha, from loose and fast to tight.
    `node` is a layer's name in the module; its last operation is bounded. The bounds are float64
    and hold in exact arithmetic, apart from zonotope's.
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    network = check_network(network)
    box = _region(x, eps, domain, norm)
    if not box.lower.dim():
        raise UserError("x has no dimensions: give a batch of inputs, the batch first")
    if isinstance(network, nn.Module):
        graph = _traced(network, x, box)
    else:
        graph = network if isinstance(network, Graph) else network.graph
    if isinstance(network, OnnxNetwork) and tuple(box.lower.shape[1:]) == graph.input_shape:
        network.check([box[i : i + 1] for i in range(len(box.lower))])
    if tuple(box.lower.shape[1:]) != graph.input_shape:
        raise UserError(
            f"x has shape {tuple(box.lower.shape[1:])}, the network takes {graph.input_shape}"
        )
    graph = lowered(_upto(graph, node).detach().to(torch.float64), torch.float64)
    if not len(box.lower):  # as with any function of a batch, nothing of nothing
        nothing = box.lower.new_empty(0, *graph.output_shape)
        return Box(nothing, nothing.clone())
    reuse_freed_memory()
    with torch.no_grad(), provable():
        if method == "ibp":
            return interval.bounds(graph, box, rounding=ROUNDING)[0]
        if method == "zonotope":
            return zonotope.bounds(graph, box)[0]
        graph = expand_max_pools(share_halves(graph))
        if method == "alpha" and len(box.lower) > 1 and launches(box.lower):
            return _alpha_together(graph, box)
        if method == "alpha":
            boxes = [_alpha(graph, box[i : i + 1]) for i in range(len(box.lower))]
            return Box(
                *(torch.cat([getattr(b, side) for b in boxes]) for side in ("lower", "upper"))
            )
        effort = CROWN_IBP if method == "crown-ibp" else CROWN
        return _output_box(relax(graph, box, effort=effort, rounding=ROUNDING))


def _region(x: Tensor | Box, eps: Radius | Tensor | None, domain: Domain, norm: float | str) -> Box:
    if isinstance(x, Box):
        if eps is not None:
            raise UserError("give either a box or an input with eps, not both")
        return corners(x).map(torch.Tensor.double)
    if eps is None:
        raise UserError("eps is missing: the radius around x")
    return parse_ball(x, eps, domain, norm).outer()


def _traced(module: nn.Module, x: Tensor | Box, box: Box) -> Graph:
    """Trace a module and compare it with its graph at points between all that were given."""
    given = x.lower if isinstance(x, Box) else x
    shape = tuple(box.lower.shape[1:])
    if not len(given):
        return trace(module, shape, frozen=True)
    hull = box.lower.amin(0, keepdim=True), box.upper.amax(0, keepdim=True)
    # A module without weights computes in the precision of what it is given.
    used = given.dtype if given.is_floating_point() else torch.float64
    hull_box = Box(*(corner.to(used) for corner in hull))
    return trace(module, shape, box=hull_box, frozen=True)


def _upto(graph: Graph, node: str | None) -> Graph:
    if node is None:
        return graph
    names = [n.name for n in graph.nodes]
    if not isinstance(node, str):
        raise UserError(f"node must be the name of a layer, got {shorten(node)}")
    if node not in names:
        raise unknown_name("layer", node, set(names))
    last = len(names) - 1 - names[::-1].index(node)
    return Graph(graph.nodes[: last + 1])


def _alpha(graph: Graph, box: Box) -> Box:
    relaxation = relax(graph, box, effort=ALPHA, rounding=ROUNDING)
    size = torch.Size(graph.output_shape).numel()
    unit = torch.eye(size, dtype=torch.float64, device=box.lower.device)
    lower = best_bounds(relaxation, unit, threshold=float("inf"))
    upper = -best_bounds(relaxation, -unit, threshold=float("inf"))
    known = relaxation.boxes[relaxation.output]
    shape = known.lower.shape
    return Box(
        torch.fmax(lower.view(shape), known.lower), torch.fmin(upper.view(shape), known.upper)
    )


def _alpha_together(graph: Graph, box: Box) -> Box:
    """Bound a batch whose rows are optimised together, as many as fit into memory."""
    relaxation = relax(graph, box, effort=ALPHA, rounding=ROUNDING)
    known, target = relaxation.boxes[relaxation.output], relaxation.output
    batch, size = len(known.lower), known.lower[0].numel()
    place = torch.arange(size, device=known.lower.device).repeat(batch)
    owner = torch.arange(batch, device=place.device).repeat_interleave(size)
    lower, upper = (
        sign * optimized_units(relaxation, target, place, owner, ALPHA, sign=sign)
        for sign in (1.0, -1.0)
    )
    return Box(
        torch.fmax(lower.view_as(known.lower), known.lower),
        torch.fmin(upper.view_as(known.upper), known.upper),
    )


def _output_box(relaxation: Relaxation) -> Box:
    """Return linear bounds of all outputs, intersected with interval bounds."""
    known = relaxation.boxes[relaxation.output]
    batch, size = len(known.lower), known.lower[0].numel()
    unit = torch.eye(size, dtype=torch.float64, device=known.lower.device)
    rows = unit.view(size, *known.lower.shape[1:]).repeat(batch, *(1 for _ in known.lower.shape))
    rows = rows.view(batch * size, *known.lower.shape[1:])
    owner = torch.arange(batch, device=unit.device).repeat_interleave(size)
    lower = relaxation.lower(relaxation.output, Coefficients(rows, owner)).view_as(known.lower)
    upper = -relaxation.lower(relaxation.output, Coefficients(-rows, owner)).view_as(known.lower)
    return Box(torch.fmax(lower, known.lower), torch.fmin(upper, known.upper))
