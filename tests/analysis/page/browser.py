"""Headless Chromium: a page with a script of the test's own, and what it has left; keys; screenshots."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
PATIENCE_S = 60
WATCH = """<script>window.errors = [];
window.addEventListener("error", (event) => errors.push(event.message));
console.error = (...texts) => errors.push(texts.join(" "));</script>"""
LEFT = """<script>addEventListener("load", () => setTimeout(() => {
  let found = {};
  try { found = (() => { %s })(); } catch (error) { errors.push(String(error)); }
  const left = document.createElement("pre");
  left.id = "left";
  left.textContent = JSON.stringify({ ...found, errors });
  document.body.append(left);
}, 50));</script>"""


def run(page: Path, script: str, width: int = 1280) -> dict[str, Any]:
    """What `script`, the body of a function, returns in the loaded page; `errors` has all that went wrong."""
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{WATCH}", 1)
    watched = page.with_name(f"{page.stem}-watched.html")
    watched.write_text(text.replace("</body>", f"{LEFT % script}</body>"), encoding="utf-8")
    dom = _chromium(watched, "--dump-dom", "--virtual-time-budget=2000", f"--window-size={width},900")
    left = re.search(r'<pre id="left">(.*?)</pre>', dom, re.DOTALL)
    assert left, f"the page has not been loaded: {dom[-500:]}"
    found: dict[str, Any] = json.loads(html.unescape(left[1]))
    return found


def screenshot(page: Path, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _chromium(page, f"--screenshot={path}", f"--window-size={width},{height}", *scheme)


def press(page: Path, keys: str, script: str) -> Any:
    """What the expression `script` gives once real `keys` were pressed in the page; "\\t" is Tab, "\\r" Enter."""
    to_browser, from_browser = os.pipe(), os.pipe()
    inside = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    command = ["bash", "-c", inside, CHROMIUM, "--remote-debugging-pipe", *_options(page), "about:blank"]
    with subprocess.Popen(command, pass_fds=(to_browser[0], from_browser[1]), stderr=subprocess.DEVNULL) as process:
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            with open(to_browser[1], "wb") as sent, open(from_browser[0], "rb") as received:
                return _pressed(_Protocol(sent, received), page, keys, script)
        finally:
            process.kill()


class _Protocol:
    """Calls of the DevTools protocol, JSON that ends with a zero byte."""

    def __init__(self, sent: IO[bytes], received: IO[bytes]) -> None:
        self.sent, self.received, self.session, self.calls = sent, received, "", 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.sent.write(json.dumps(message).encode() + b"\0")
        self.sent.flush()
        while True:
            text = b"".join(iter(lambda: self.received.read(1), b"\0"))
            answer: dict[str, Any] = json.loads(text)
            if answer.get("id") == self.calls:
                assert "result" in answer, answer
                result: dict[str, Any] = answer["result"]
                return result


def _pressed(devtools: _Protocol, page: Path, keys: str, script: str) -> Any:
    target = devtools.call("Target.createTarget", url=page.as_uri())["targetId"]
    devtools.session = devtools.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    loaded, end = (
        f"document.readyState === 'complete' && document.URL === '{page.as_uri()}'",
        time.monotonic() + PATIENCE_S,
    )
    while not devtools.call("Runtime.evaluate", expression=loaded)["result"]["value"]:
        assert time.monotonic() < end, "the page has not been loaded"
    for key in keys:
        name = {"\t": "Tab", "\r": "Enter", " ": " "}[key]
        named = {"key": name, "code": name.replace(" ", "Space"), "windowsVirtualKeyCode": ord(key)}
        devtools.call("Input.dispatchKeyEvent", type="keyDown", text=key.strip("\t"), **named)
        devtools.call("Input.dispatchKeyEvent", type="keyUp", **named)
    answer = devtools.call("Runtime.evaluate", expression=script, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"]["value"]


def _options(page: Path) -> list[str]:
    return ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}"]  # fmt: skip


def _chromium(page: Path, *options: str) -> str:
    command = [CHROMIUM, *_options(page), *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
