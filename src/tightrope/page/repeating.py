"""Settings, and the commands that repeat a run."""

from __future__ import annotations

from tightrope.page.content import Contents
from tightrope.page.markup import Markup, each, tag


def draw_settings(run: Contents) -> Markup:
    """Return the commands of a run, ready to copy, and all its settings."""
    commands = None
    if run.commands:
        commands = tag(
            "div",
            tag("h4", "Commands to repeat it"),
            each(_command(command) for command in run.commands),
        )
    return tag("div", commands, _table("Settings", run), _further(run))


def _command(command: str) -> Markup:
    button = tag("button", "Copy", type="button", class_="copy", hidden=True)
    code = tag("pre", tag("code", command), tabindex="0")
    return tag("div", code, button, class_="command")


def _table(title: str, run: Contents) -> Markup | None:
    if not run.settings:
        return None
    pairs = each(_pair(name, value) for name, value in run.settings.items())
    return tag("div", tag("h4", title), tag("dl", pairs, class_="settings"))


def _further(run: Contents) -> Markup | None:
    if not run.further:
        return None
    pairs = each(_pair(name, value) for name, value in run.further.items())
    return tag("div", tag("h4", "Further results"), tag("dl", pairs, class_="settings"))


def _pair(name: str, value: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value))
