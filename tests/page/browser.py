"""A real browser for tests: Chromium without a window, spoken to over a pair of pipes.

`--remote-debugging-pipe` takes the DevTools protocol as JSON, each message ended by a zero byte,
on file descriptors 3 and 4. Nothing but the standard library is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hangs import PATIENCE

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    " ": (32, " "),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "Home": (36, ""),
}


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


class Browser:
    """One browser process; `events` are what it reported, the newest last."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Far from 3 and 4, so that neither is overwritten before it is copied there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 40) for end in (to_browser, from_browser)]

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=connect,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._pending = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(PATIENCE)
            assert answer is not None, f"the browser does not answer {method}"
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def listen_until(self, condition: Callable[[], bool], what: str) -> None:
        """Collect events until there is what was waited for."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            message = self._read(max(0.0, deadline - time.monotonic()))
            assert message is not None, f"the browser does not tell of {what}"
            self.events.append(message)

    def _read(self, timeout: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout
        while b"\0" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._in], [], [], left)[0]:
                return None
            chunk = os.read(self._in, 1 << 16)
            assert chunk, "the browser died"
            self._pending += chunk
        text, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)


class Tab:
    """A page in the browser, with everything it logs and asks the network for."""

    def __init__(
        self,
        browser: Browser,
        page: Path,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        mobile: bool = False,
    ) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height, mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.url = page.resolve().as_uri()
        self.call("Page.navigate", url=self.url)
        browser.listen_until(lambda: bool(self.of("Page.loadEventFired")), "a loaded page")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command about this page."""
        return self.browser.call(method, self.session, **parameters)

    def of(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of this page's events of one kind."""
        return [
            event["params"]
            for event in self.browser.events
            if event.get("sessionId") == self.session and event["method"] == method
        ]

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """Set the size of the screen."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def run(self, expression: str) -> Any:
        """Evaluate JavaScript and return its value; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has nothing to do, and collect what it has told by then."""
        self.run("new Promise(done => setTimeout(() => setTimeout(done)))")

    def press(self, key: str) -> None:
        """Press a key, as a person would."""
        code, text = KEYS[key]
        name = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **name)
        self.call("Input.dispatchKeyEvent", type="keyUp", **name)

    def centre(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return its centre on the screen."""
        return tuple(  # type: ignore[return-value]
            self.run(
                f"""(() => {{
                    const element = document.querySelector({json.dumps(selector)});
                    element.scrollIntoView({{block: "center", behavior: "instant"}});
                    const box = element.getBoundingClientRect();
                    return [box.x + box.width / 2, box.y + box.height / 2];
                }})()"""
            )
        )

    def click(self, selector: str) -> None:
        """Click into the middle of an element."""
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        x, y = self.centre(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Save what can be seen, or the whole page, as PNG."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, **_size(size), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def problems(self) -> list[str]:
        """Return errors, exceptions and messages of the console."""
        found = [str(event) for event in self.of("Runtime.exceptionThrown")]
        found += [str(event) for event in self.of("Log.entryAdded")]
        found += [str(event) for event in self.of("Runtime.consoleAPICalled")]
        return found

    def requests(self) -> list[str]:
        """Return what was asked of the network, other than the page itself."""
        urls = [event["request"]["url"] for event in self.of("Network.requestWillBeSent")]
        return [url for url in urls if url != self.url and not url.startswith("data:")]

    def close(self) -> None:
        """Close the page."""
        self.browser.call("Target.closeTarget", targetId=self.target)


def _size(size: dict[str, float]) -> dict[str, float]:
    return {"width": size["width"], "height": size["height"]}
