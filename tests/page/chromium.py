"""Where Chromium is, and what to do if it is nowhere."""

from __future__ import annotations

import shutil

# What installs Chromium, by the program that does it.
INSTALLERS = {
    "apt-get": "sudo apt-get install -y chromium",
    "dnf": "sudo dnf install -y chromium",
    "pacman": "sudo pacman -S --noconfirm chromium",
    "apk": "sudo apk add chromium",
    "brew": "brew install --cask chromium",
}


def find_browser() -> str | None:
    """Return the path of a Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def how_to_get_one() -> str:
    """Return the command that installs a Chromium here."""
    known = (command for program, command in INSTALLERS.items() if shutil.which(program))
    return next(known, "put a Chromium named chromium on the path")
