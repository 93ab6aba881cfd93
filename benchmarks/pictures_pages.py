"""Opens pages in a headless Chromium, and takes screenshots that are small enough for a repository."""

import base64
import io
import sys
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from chromium import Browser, Tab

WIDTH, HEIGHT = 1280, 1000
COLOURS = 128
"""Number of colours of a picture. One round of k-means after the median cut keeps rare colours, such as thin lines."""
MOST_BYTES = 250_000
FEWEST_COLOURS = 32
PATIENCE_S = 120.0


def variant(target: Path, dark: bool) -> Path:
    """Return the file of a picture for light or for dark pages: NAME.png or NAME-dark.png."""
    return target.with_stem(f"{target.stem}-dark") if dark else target


def shoot(browser: Browser, address: str, part: str, target: Path) -> None:
    """Take screenshots of a page, light and dark, that begin at the element with this id and have the height of a
    window."""
    for dark in (False, True):
        with Tab(browser, (WIDTH, HEIGHT), dark) as tab:
            opened(tab, address)
            top = tab.ask(f"document.getElementById('{part}').getBoundingClientRect().top + scrollY")
            _save(_taken(tab, (0.0, top, float(WIDTH), float(HEIGHT))), variant(target, dark))


def opened(tab: Tab, address: str) -> None:
    """Open an address, and wait until the page is loaded."""
    tab.call("Page.navigate", url=address)
    until(tab, "document.readyState === 'complete' && location.href !== 'about:blank'")


def until(tab: Tab, condition: str) -> None:
    """Wait until a JavaScript condition holds, for content that is drawn after the page is loaded. Raises SystemExit
    after PATIENCE_S."""
    end_s = time.monotonic() + PATIENCE_S
    while not tab.ask(condition):
        if time.monotonic() > end_s:
            raise SystemExit(f"{tab.ask('location.href')}: not within {PATIENCE_S:g} s: {condition}")
        time.sleep(0.2)


def element(tab: Tab, selector: str, target: Path) -> None:
    """Take a screenshot of one element of an open page."""
    code = f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
    x, y, wide, high = tab.ask(code + " return [b.x + scrollX, b.y + scrollY, b.width, b.height]; })()")
    _save(_taken(tab, (x, y, wide, high)), target)


def window(tab: Tab, target: Path) -> None:
    """Take a screenshot of the visible part of a page, without a resize that would make MLflow redraw everything."""
    _save(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]), target)


def _taken(tab: Tab, place: tuple[float, float, float, float]) -> bytes:
    clip = dict(zip(("x", "y", "width", "height"), place, strict=True)) | {"scale": 1.0}
    found = tab.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(found["data"])


def _save(data: bytes, target: Path) -> None:
    with Image.open(io.BytesIO(data)) as picture:
        smaller(picture.convert("RGB"), target)


def smaller(picture: Image.Image, target: Path) -> None:
    """Save with as many colours as the limit of bytes allows; text needs few. Raises SystemExit if the file is too
    large with 32 colours."""
    colours = COLOURS
    while True:
        few = picture.quantize(colours, Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE)
        few.save(target, optimize=True)
        if target.stat().st_size <= MOST_BYTES:
            return
        colours //= 2
        if colours < FEWEST_COLOURS:
            raise SystemExit(f"{target.name} is larger than {MOST_BYTES:,} bytes even in {FEWEST_COLOURS} colours")
