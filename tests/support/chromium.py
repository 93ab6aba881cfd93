"""Controls a real headless Chromium over a pipe with its own protocol (chromedevtools.github.io/devtools-protocol).

No driver is installed, because the tests need only about a dozen calls. Each wait ends as soon as its condition holds.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
VARIABLE = "RATCHET_CHROMIUM"
"""Environment variable with the path of the program, for programs that have none of the names in NAMES."""
WAIT_S = 60.0
"""Timeout in seconds. A browser that does not answer for this long counts as broken."""
KEYS = {
    "Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowDown": (40, ""), "ArrowUp": (38, ""),
    "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "End": (35, ""), "Home": (36, ""), "Escape": (27, ""),
}  # fmt: skip


def find() -> str | None:
    """Return the path of the browser's program, or None if there is none."""
    return os.environ.get(VARIABLE) or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def browser(program: str, home: Path) -> Iterator["Browser"]:
    """Start a browser with an empty profile. At the end of the block, the browser and its child processes are
    killed."""
    read, write = os.pipe(), os.pipe()
    options = [
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        "--force-color-profile=srgb", f"--user-data-dir={home}", "about:blank",
    ]  # fmt: skip
    # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
    order = f'exec "$@" 3<&{read[0]} 4>&{write[1]}'
    process = subprocess.Popen(
        ["bash", "-c", order, "bash", program, *options], pass_fds=(read[0], write[1]), start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    os.close(read[0])
    os.close(write[1])
    try:
        yield Browser(read[1], write[0])
    finally:
        os.close(read[1])
        os.close(write[0])
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Browser:
    """The client's end of the pipe to the browser."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers, self._number, self._rest = orders, answers, 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer. Events that arrive in the meantime are appended to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._orders, data) :]
        while True:
            found = self._next(WAIT_S)
            if found.get("id") == self._number:
                if "error" in found:
                    raise AssertionError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def wait(self, method: str) -> None:
        """Wait until an event with this name arrives."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next(WAIT_S))

    def _next(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._answers, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser ended" if ready else f"the browser said nothing for {limit_s:g} s")
            self._rest += part
        one, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(one)
        return found


class Tab:
    """An open page."""

    def __init__(
        self, browser: Browser, size: tuple[int, int] = (1280, 900), dark: bool = False, script: bool = True
    ) -> None:
        self._browser, self._runs_scripts = browser, script
        made = browser.call("Target.createTarget", url="about:blank")
        self._target = made["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[colours])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, file: Path | str) -> None:
        """Load a file or an address, and wait until it is loaded."""
        self._browser.events.clear()
        self.call("Page.navigate", url=file if isinstance(file, str) else file.as_uri())
        self._browser.wait("Page.loadEventFired")

    def wait_for_charts(self) -> None:
        """Wait until the page's script has drawn all charts."""
        self.wait_for("document.documentElement.dataset.drawn")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript condition holds."""
        end = time.monotonic() + WAIT_S
        while not self.ask(condition):
            assert time.monotonic() < end, f"{condition} does not hold: {self.complaints()}"
            time.sleep(0.02)

    def requests(self) -> list[str]:
        """Return the addresses that the page requested since `open`, including the address of the file itself."""
        self.ask("0")
        return [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Return the messages in the console and the uncaught errors."""
        self.ask("0")
        found = [*self._events("Log.entryAdded"), *self._events("Runtime.consoleAPICalled")]
        found += self._events("Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in found]

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("method") == method]

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise, its result. The protocol evaluates the expression,
        so it runs even where the page's policy forbids scripts."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Return the text of each visible element that matches the selector."""
        one = "[...document.querySelectorAll(%s)].filter(x => x.checkVisibility()).map(x => x.innerText.trim())"
        found: list[str] = self.ask(one % json.dumps(selector))
        return found

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of the first element that matches the selector."""
        shown = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{shown}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        if self._runs_scripts:  # wait until this, and what an earlier click has changed, is drawn
            for _ in range(2):
                self.ask("new Promise(requestAnimationFrame)")
        middle = "(b => [b.x + b.width / 2, b.y + b.height / 2])"
        x, y = self.ask(f"{middle}({shown}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key of the keyboard: a name in KEYS, or a letter or digit. The focused element receives it."""
        code, text = KEYS.get(key) or (ord(key.upper()), key)
        more = {"text": text} if text else {}
        names = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def reach(self, condition: str) -> None:
        """Press Tab until the condition holds for the focused element."""
        for _ in range(80):
            self.press("Tab")
            if self.ask(f"Boolean({condition})"):
                return
        raise AssertionError(f"the keyboard does not reach {condition}")

    def choose(self, by: str, value: str) -> None:
        """Set the value of the control with this `data-by`. The page receives the same events as for a user's
        choice."""
        events = "".join(f"x.dispatchEvent(new Event('{name}', {{bubbles: true}}));" for name in ("input", "change"))
        code = f"(() => {{ const x = document.querySelector('[data-by={by}]'); x.value = %s; {events} }})()"
        self.ask(code % json.dumps(value))

    def write(self, text: str) -> None:
        """Type text into the focused element."""
        self.call("Input.insertText", text=text)

    def assert_opens(self, file: Path, dark: bool) -> None:
        """Check that the file opens without console messages, requests and a horizontal scroll bar, and that its
        background is dark or light as expected."""
        self.open(file)
        # Plotly's surfaces are images in the page itself.
        assert [one for one in self.requests() if not one.startswith("data:")] == [file.as_uri()]
        assert self.complaints() == []
        assert self.ask("document.documentElement.scrollWidth <= innerWidth")
        ground = self.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == dark

    def assert_refuses_foreign_content(self) -> None:
        """Check that the page's content security policy blocks a script and an image from outside the page."""
        for kind, what in (("script", "textContent: 'window.ran = 1'"), ("img", "src: 'http://127.0.0.1:9/x.png'")):
            self.ask(f"document.body.append(Object.assign(document.createElement('{kind}'), {{{what}}}))")
        assert self.ask("window.ran") is None
        assert sum("Content Security Policy" in said for said in self.complaints()) == 2

    def assert_prints(self) -> None:
        """Check that the printed page has no controls and does not overflow the sheet."""
        self.call("Emulation.setEmulatedMedia", media="print")
        assert (self.texts(".controls"), self.texts("nav")) == ([], [])
        assert self.ask("document.documentElement.scrollWidth <= innerWidth")
        assert self.call("Page.printToPDF")["data"].startswith("JVBERi0")
