"""Takes screenshots of generations: a stream, a chat, the live screen, the judgement of answers. Part of pictures.py.

    python benchmarks/pictures_generation.py [--target FOLDER]

The script takes half a minute. The screens are real. The model of the live screen (with random weights) and its figures
are real, too. For the stream and the chat, a server on loopback sends scripted answers, and the judged answers are
scripted, because models as small as those of the benchmarks do not reason.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import pictures_pages
from pictures_pages import Browser, Tab
from pictures_terminal import Screen, screen

import generations
from chromium import browser, find
from label_cases import LabelProcess
from ratchet.config.machine import EndpointSettings
from ratchet.config.settings import Settings
from ratchet.storage.layout import ProjectLayout
from scripted_endpoint import JSON, Said, served, serving, streamed

TARGET = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = (100, 24)
PROMPTS, SHOWN_AT = 6000, 0.6
"""Number of prompts of the live screen, and the share of them that is answered when the picture is taken."""
PATIENCE_S = 900.0
SLOW_S = 0.02
"""Seconds between two pieces of an answer of the server."""
QUESTIONS = (
    "My parcel was to come on Monday. It is Thursday, and the tracking page says nothing.",
    "You have charged me twice for the same month.",
)
SAID = {
    "parcel": (
        "The customer waits for a parcel that is three days late, and tracking does not help. That is about delivery, "
        "not about a bill: the team is shipping. They want to know what happens next.",
        "shipping\n\nI am sorry about the wait. Three days without a scan usually means that a label was damaged; I "
        "have asked the carrier to look for it, and you will hear from us by tomorrow noon.",
    ),
    "twice": (
        "Charged twice for one month: a bill. Before I promise a refund I should say when it arrives.",
        "billing\n\nThe second charge is being returned; it takes three to five working days, as banks go.",
    ),
    "": ("They ask for it again, and shorter.", "It comes back in three to five working days."),
}


JUDGED = {
    "champion.jsonl": (
        "We are sorry. Parcels are sometimes late. Please wait a few more days and look at the tracking page again.",
        "Please send us your invoice.",
    ),
    "candidate.jsonl": (
        "I am sorry about the wait. Three days without a scan usually means a damaged label. I have asked the carrier "
        "to look for your parcel, and you will hear from us by tomorrow noon.",
        "The second charge is being returned; it takes three to five working days.",
    ),
}
"""Answers of two models to QUESTIONS, by file."""
LABEL_SIZE = (900, 520)


def answer(body: JSON, number: int) -> Said:
    """Return the server's answer to a question, word by word."""
    asked = str(body["messages"][-1]["content"])
    thought, said = next(found for word, found in SAID.items() if word in asked)
    asked_tokens = sum(len(str(message["content"]).split()) for message in body["messages"])
    return streamed(*words(f"<think>{thought}</think>{said}"), hold_s=SLOW_S, prompt_tokens=asked_tokens)


def words(text: str) -> Iterator[str]:
    """Yield the pieces of a text in the form in which models stream them."""
    for word in text.split(" "):
        yield f"{word} "


def take(drawn: Browser, scratch: Path, target: Path) -> None:
    """Take the screenshots."""
    settings = generations.with_generate(max_new_tokens=400)
    machine = settings.machine.model_copy(update={"endpoint": EndpointSettings(), "threads": 2})
    settings = settings.model_copy(update={"machine": machine})
    layout = generations.project(scratch / "support", settings)
    with served(answer, serving("support-8b")) as server:
        model = f"{server.url}#support-8b"
        _stream(layout, model, drawn, scratch, target)
        _chat(layout, model, drawn, scratch, target)
    _live(layout, settings, drawn, scratch, target)
    _label(layout, drawn, target)


def _stream(layout: ProjectLayout, model: str, drawn: Browser, scratch: Path, target: Path) -> None:
    prompts = layout.root / "requests.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in QUESTIONS), encoding="utf-8")
    with _on_screen(scratch, layout, "generate", "requests.jsonl", "--stream", "--model", model) as terminal:
        terminal.end()
        terminal.shoot(drawn, scratch, target / "stream.png")


def _chat(layout: ProjectLayout, model: str, drawn: Browser, scratch: Path, target: Path) -> None:
    with _on_screen(scratch, layout, "chat", "--model", model) as terminal:
        terminal.wait(r"(?m)^>", 60)
        for count, text in enumerate((QUESTIONS[1], "And when do I have it?"), start=1):
            terminal.press("-l", text)
            terminal.press("Enter")
            terminal.until(lambda count=count: terminal.text().count("tokens/s") == count, "no answer", PATIENCE_S)
        terminal.shoot(drawn, scratch, target / "chat.png")


def _live(layout: ProjectLayout, settings: Settings, drawn: Browser, scratch: Path, target: Path) -> None:
    generations.chat_directory(layout.root / "model")
    longer = generations.with_generate(settings, max_new_tokens=48, temperature=0.8)
    generations.project_settings(layout, longer)
    generations.write_prompts(layout.root / "questions.jsonl", PROMPTS)
    words = ("generate", "questions.jsonl", "--output", "answers.jsonl", "--model", "model")
    with _on_screen(scratch, layout, *words) as terminal:
        terminal.until(lambda: share(terminal.text()) >= SHOWN_AT, "too few answers", PATIENCE_S)
        terminal.shoot(drawn, scratch, target / "generation.png")


def _label(layout: ProjectLayout, drawn: Browser, target: Path) -> None:
    for name, answers in JUDGED.items():
        rows = [{"prompt": text, "answer": said} for text, said in zip(QUESTIONS, answers, strict=True)]
        (layout.root / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with LabelProcess(layout, *JUDGED, "--port", "0", "--rater", "Ann") as server:
        for dark in (False, True):
            with Tab(drawn, LABEL_SIZE, dark) as tab:
                pictures_pages.opened(tab, server.address)
                pictures_pages.until(tab, "document.querySelector('#answers p').textContent")
                pictures_pages.window(tab, pictures_pages.variant(target / "label.png", dark))


def share(text: str) -> float:
    """Return the completed share of a generation, read from its screen."""
    found = [line.split() for line in text.splitlines() if line.startswith("answer ")]
    return int(found[0][1].replace(",", "")) / int(found[0][3].replace(",", "")) if found else 0.0


@contextmanager
def _on_screen(scratch: Path, layout: ProjectLayout, *words: str) -> Iterator[Screen]:
    with screen(scratch, ["ratchet", *words], layout.root, SIZE) as terminal:
        yield terminal
    time.sleep(0.5)  # tmux needs this time to close its socket


def main(arguments: Sequence[str] | None = None) -> int:
    """Take only these pictures. The exit code is 2 if a program is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, metavar="FOLDER", help="default: docs/pictures")
    options = parser.parse_args(arguments)
    if (chromium := find()) is None:
        print("not here: chromium (Debian: apt-get install chromium tmux)", file=sys.stderr)
        return 2
    options.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pic-") as folder, ExitStack() as stack:
        scratch = Path(folder)
        take(stack.enter_context(browser(chromium, scratch / "browser")), scratch, options.target.resolve())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
