"""Abstract domains: sound over-approximations of what a network can output."""

from tightrope.box import Box

__all__ = ["Box"]
