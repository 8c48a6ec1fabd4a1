"""Headless Chromium: a page with a script of the test's own, and what it has left; screenshots."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

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


def _chromium(page: Path, *options: str) -> str:
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--host-resolver-rules=MAP * ~NOTFOUND",
               f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
