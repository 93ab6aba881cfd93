"""A real headless Chromium, driven over a pipe by its own protocol (chromedevtools.github.io/devtools-protocol).

No driver is installed for it: what the tests need are a dozen calls. Every wait ends at once when its condition holds.
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
"""Environment variable that names the program, where it has none of the usual names."""
WAIT_S = 60.0
"""A browser that does not answer for so long is broken."""
KEYS = {
    "Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowDown": (40, ""), "ArrowUp": (38, ""),
    "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "End": (35, ""), "Home": (36, ""),
}  # fmt: skip


def find() -> str | None:
    """The browser's program, if there is one."""
    return os.environ.get(VARIABLE) or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def browser(program: str, home: Path) -> Iterator["Browser"]:
    """A browser with nobody's settings; it ends with the block, and so do its children."""
    read, write = os.pipe(), os.pipe()
    options = [
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        "--force-color-profile=srgb", f"--user-data-dir={home}", "about:blank",
    ]  # fmt: skip
    # The browser reads orders from descriptor 3 and answers on 4.
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
    """The browser's end of the pipe."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers, self._number, self._rest = orders, answers, 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One order and its answer; what happens meanwhile is noted in `events`."""
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
        """Until an event of this name has come."""
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
    """A page that is open."""

    def __init__(
        self, browser: Browser, size: tuple[int, int] = (1280, 900), dark: bool = False, script: bool = True
    ) -> None:
        self._browser = browser
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
        """An order to this page."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, file: Path) -> None:
        """Load a file and wait until it is there."""
        self._browser.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self._browser.wait("Page.loadEventFired")

    def requests(self) -> list[str]:
        """Addresses that were asked for since `open`, the file's own among them."""
        self.ask("0")
        return [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """What stands in the console, and errors that nobody caught."""
        self.ask("0")
        found = [*self._events("Log.entryAdded"), *self._events("Runtime.consoleAPICalled")]
        found += self._events("Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in found]

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("method") == method]

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; ours, so it runs where the page's own script may not."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """What can be read of all elements that are seen."""
        one = "[...document.querySelectorAll(%s)].filter(x => x.checkVisibility()).map(x => x.innerText.trim())"
        found: list[str] = self.ask(one % json.dumps(selector))
        return found

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the first such element."""
        code = (
            "(() => { const x = document.querySelector(%s); x.scrollIntoView({block: 'center', behavior: 'instant'});"
        )
        code += " const b = x.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        x, y = self.ask(code % json.dumps(selector))
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key of the keyboard, for whatever has the focus."""
        code, text = KEYS[key]
        more = {"text": text} if text else {}
        names = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def reach(self, condition: str) -> None:
        """Press Tab until this holds of the element that has the focus."""
        for _ in range(80):
            self.press("Tab")
            if self.ask(f"Boolean({condition})"):
                return
        raise AssertionError(f"the keyboard does not reach {condition}")

    def choose(self, by: str, value: str) -> None:
        """A value of the control with this `data-by`; the page gets the events of a reader's choice."""
        events = "".join(f"x.dispatchEvent(new Event('{name}', {{bubbles: true}}));" for name in ("input", "change"))
        code = f"(() => {{ const x = document.querySelector('[data-by={by}]'); x.value = %s; {events} }})()"
        self.ask(code % json.dumps(value))

    def write(self, text: str) -> None:
        """Text into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def assert_opens(self, file: Path, dark: bool) -> None:
        """The file opens without complaints, requests and a scroll bar, on a ground as dark as was asked for."""
        self.open(file)
        assert self.requests() == [file.as_uri()]
        assert self.complaints() == []
        assert self.ask("document.documentElement.scrollWidth <= innerWidth")
        ground = self.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == dark

    def assert_refuses_foreign_content(self) -> None:
        """The policy of the page stops a script and a picture that are not its own."""
        for kind, what in (("script", "textContent: 'window.ran = 1'"), ("img", "src: 'http://127.0.0.1:9/x.png'")):
            self.ask(f"document.body.append(Object.assign(document.createElement('{kind}'), {{{what}}}))")
        assert self.ask("window.ran") is None
        assert sum("Content Security Policy" in said for said in self.complaints()) == 2

    def assert_prints(self) -> None:
        """On paper there are no controls, and the sheet is wide enough."""
        self.call("Emulation.setEmulatedMedia", media="print")
        assert (self.texts(".controls"), self.texts("nav")) == ([], [])
        assert self.ask("document.documentElement.scrollWidth <= innerWidth")
        assert self.call("Page.printToPDF")["data"].startswith("JVBERi0")
