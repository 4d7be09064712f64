"""A headless Chromium over its debugging pipe: opens pages as a reader sees them, and evaluates JavaScript in them.

Chrome DevTools Protocol, messages as JSON that end with a zero byte, from file descriptor 3 and to 4 of the browser.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless browser that fetches nothing by itself."""

    def __init__(self, program: str, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-browser-", ignore_cleanup_errors=True)
        to_browser, self._send = os.pipe()
        self._receive, from_browser = os.pipe()
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
            "about:blank",
        ]
        # A shell moves the two ends to the descriptors that the browser expects.
        moved = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "browser", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._bytes = b""
        self._session: str | None = None
        attached = self.call("Target.attachToTarget", targetId=self._first_page(), flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def _first_page(self) -> str:
        """The page that the browser opens by itself, a moment after it answers the first command."""
        until = time.monotonic() + self.deadline_s
        while time.monotonic() < until:
            for each in self.call("Target.getTargets")["targetInfos"]:
                if each["type"] == "page":
                    return str(each["targetId"])
            time.sleep(0.01)
        raise RuntimeError(f"no page within {self.deadline_s} s")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._send)
        os.close(self._receive)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; RuntimeError when the browser refuses it or does not answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.deadline_s
        while time.monotonic() < until:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
        raise RuntimeError(f"{method}: no answer within {self.deadline_s} s")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._bytes:
            read = os.read(self._receive, 1 << 20)
            if not read:
                raise RuntimeError("the browser has ended")
            self._bytes += read
        line, _, self._bytes = self._bytes.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def show(self, width: int, height: int, scheme: str) -> None:
        """The size of the window in pixels, and what the reader prefers: "light" or "dark"."""
        # Not as a telephone, which would zoom out where a page is too wide.
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Goes to a page, and waits until it is complete."""
        self.call("Page.navigate", url=address)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Waits until an expression is true; RuntimeError at the deadline."""
        until = time.monotonic() + self.deadline_s
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError):
                if self.evaluate(script):
                    return
            time.sleep(0.02)
        raise RuntimeError(f"not so within {self.deadline_s} s: {script}")

    def picture(self, path: Path) -> None:
        """Writes what the window shows, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
