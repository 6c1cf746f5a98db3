"""A network as a graph of a few operations."""

from tightrope.graph.graph import Graph, Node
from tightrope.graph.trace.tracing import trace

__all__ = ["Graph", "Node", "trace"]
