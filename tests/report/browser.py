"""Pages in Chromium without a window, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

EXECUTABLE = os.environ.get("EQUIPOISE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
MISSING = "no Chromium is installed (or named by EQUIPOISE_BROWSER)"
# Chromium reads commands from file descriptor 3 and writes answers to 4.
START = """
import fcntl, os, sys
first, second = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(first, 3)
os.dup2(second, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
TAB = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}


class Browser:
    """One tab of a browser.

    ``complaints`` lists what the pages wrote to the console and the errors that they met.
    """

    def __init__(self, profile):
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", START, str(commands), str(answers)),
                EXECUTABLE,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
            ],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._numbers, self._read, self._session = itertools.count(1), b"", None
        self.complaints, self._loaded = [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        """End the browser."""
        try:
            self.call("Browser.close")
        finally:
            os.close(self._commands)
            os.close(self._answers)
            self._process.wait(timeout=30)

    def call(self, method, **params):
        """Carry out a command of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._commands, rest) :]
        while (answer := self._next()).get("id") != number:
            self._notice(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self, seconds=60):
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            assert ready, f"the browser says nothing for {seconds} seconds"
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._read += more
        answer, _, self._read = self._read.partition(b"\0")
        return json.loads(answer)

    def _notice(self, event):
        kind = event.get("method")
        if kind in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(event["params"])
        self._loaded = self._loaded or kind == "Page.loadEventFired"

    def show(self, width, scheme="light", media="screen", height=900):
        """Set the size of the window and the colours that its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=preferred)

    def open(self, page):
        """Open a file, wait until it is drawn, and return how many seconds that took."""
        self._loaded, began = False, time.monotonic()
        self.call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._notice(self._next())
        # What a frame shows is drawn before the next frame begins.
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return time.monotonic() - began

    def evaluate(self, expression):
        """Return the value of an expression of JavaScript."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press_tab(self):
        """Press the tabulator key."""
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **TAB)
        self.call("Input.dispatchKeyEvent", type="keyUp", **TAB)

    def picture(self):
        """Return the whole page as PNG."""
        self.call("Page.bringToFront")
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def pdf(self):
        """Return the page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF")["data"])
