"""Strict bounds of one property on thousands of small boxes of inputs."""
