"""Keeps the turns of a chat and builds the request for the next answer.

Reasoning is not stored, since chat templates omit the reasoning of earlier turns.
"""

import json
from pathlib import Path

from ratchet.config.settings import Settings
from ratchet.data.conversation import Conversation, Message
from ratchet.data.tokenization import merge_system_messages
from ratchet.errors import SettingsError
from ratchet.inference.backend import GenerationRequest
from ratchet.inference.prompts import Prompt
from ratchet.inference.reasoning import split_reasoning
from ratchet.inference.spec import replace_surrogates
from ratchet.storage import digests, files


class ChatSession:
    """A chat: user messages with their answers.

    Args:
        settings: generate.system_prompt, generate.reasoning_tags and prepare.system are read.
    """

    def __init__(self, settings: Settings) -> None:
        self.system = settings.generate.system_prompt
        """System message for the next request, or None."""
        self._tags = settings.generate.reasoning_tags
        self._merge_system = settings.prepare.system == "merge"
        self._turns: list[tuple[str, str]] = []
        self._message, self._is_answered, self._sample = "", False, 0
        self._saved: set[Path] = set()

    def ask(self, text: str) -> GenerationRequest:
        """Return the request for an answer to a new user message."""
        self._message, self._is_answered, self._sample = replace_surrogates(text), False, 0
        return self._question()

    def regenerate(self) -> GenerationRequest | None:
        """Remove the last answer and return a request for another one; None if there is no message."""
        if not self._message:
            return None
        if self._is_answered:
            self._turns.pop()
        self._is_answered = False
        self._sample += 1
        return self._question()

    def add_answer(self, text: str) -> None:
        """Add the answer to the last message; reasoning with a missing begin tag is removed."""
        self._turns.append((self._message, split_reasoning(text, self._tags).answer))
        self._is_answered = True

    def reset(self) -> None:
        """Remove all turns. The system message stays."""
        self._turns, self._message, self._is_answered = [], "", False

    def __len__(self) -> int:
        return len(self._turns)

    def _question(self) -> GenerationRequest:
        conversation = Conversation([*self._messages(), {"role": "user", "content": self._message}])
        if self._merge_system:
            conversation = merge_system_messages(conversation)
        digest = digests.hash_json([conversation.messages, conversation.tools])
        number = len(self._turns) + 1
        return GenerationRequest(number, self._sample, Prompt(f"{number}", digest, conversation))

    def _messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        roles = ("user", "assistant")
        return [*system, *({"role": r, "content": t} for turn in self._turns for r, t in zip(roles, turn, strict=True))]

    def save(self, path: Path) -> None:
        """Write the chat as one record of messages, which `ratchet prepare` can read.

        Raises:
            SettingsError: the chat is empty, the name does not end in .jsonl, or another file has this name.
            OSError: the file cannot be written; no partial file is left behind.
        """
        target = path.expanduser().absolute()
        if not self._turns:
            raise SettingsError("the chat is empty; there is nothing to save")
        if target.suffix != ".jsonl":
            raise SettingsError(f"{path}: found ending {target.suffix!r}; expected .jsonl")
        if target not in self._saved and target.exists():
            raise SettingsError(f"{path}: the file exists already; name another file")
        record = json.dumps({"messages": self._messages()}, ensure_ascii=False, allow_nan=False)
        files.write_atomic(target, f"{record}\n")
        self._saved.add(target)
