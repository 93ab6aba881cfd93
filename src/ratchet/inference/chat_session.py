"""A conversation with a model: what was said until now, as the next question shows it to the model.

Reasoning is no part of it: chat templates leave that of earlier turns out.
"""

import json
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.data.conversation import Conversation, Message
from ratchet.data.tokenization import merge_system_messages
from ratchet.errors import SettingsError
from ratchet.inference.backend import GenerationRequest
from ratchet.inference.prompts import Prompt
from ratchet.inference.reasoning import split_reasoning
from ratchet.inference.spec import replace_surrogates
from ratchet.storage import digests, files


class ChatSession:
    """Turns of user and assistant, each question with its answer.

    Args:
        settings: sections generate (system, reasoning_marks) and prepare (system) are read.
    """

    def __init__(self, settings: Settings) -> None:
        self.system = settings.generate.system
        """System message of the next question; None: none."""
        self._marks = settings.generate.reasoning_marks
        self._merges = settings.prepare.system == "merge"
        self._turns: list[tuple[str, str]] = []
        self._asked, self._is_answered, self._sample = "", False, 0
        self._saved: set[Path] = set()

    def ask(self, text: str) -> GenerationRequest:
        """The next question, after all that was said."""
        self._asked, self._is_answered, self._sample = replace_surrogates(text), False, 0
        return self._question()

    def again(self) -> GenerationRequest | None:
        """The last question once more, its answer taken back, with other draws; None: there is none."""
        if not self._asked:
            return None
        if self._is_answered:
            self._turns.pop()
        self._is_answered = False
        self._sample += 1
        return self._question()

    def answered(self, text: str) -> None:
        """What was said to the last question; it is part of the conversation from now on. Reasoning that nobody saw
        begin (some servers leave the first mark out) is no part of it."""
        self._turns.append((self._asked, split_reasoning(text, self._marks).answer))
        self._is_answered = True

    def reset(self) -> None:
        """Begin anew. The system message stays."""
        self._turns, self._asked, self._is_answered = [], "", False

    def __len__(self) -> int:
        return len(self._turns)

    def _question(self) -> GenerationRequest:
        conversation = Conversation([*self._messages(), {"role": "user", "content": self._asked}])
        if self._merges:
            conversation = merge_system_messages(conversation)
        of = digests.hash_json([conversation.messages, conversation.tools])
        number = len(self._turns) + 1
        return GenerationRequest(number, self._sample, Prompt(f"{number}", of, conversation))

    def _messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        roles = ("user", "assistant")
        return [*system, *({"role": r, "content": t} for turn in self._turns for r, t in zip(roles, turn, strict=True))]

    def save(self, path: Path) -> None:
        """Write the conversation as one record of messages, as `ratchet prepare` reads them.

        Raises:
            SettingsError: nothing was said, the name has another ending than .jsonl, or the file is there and not ours.
            OSError: it cannot be written; nothing half-written is left.
        """
        target = path.expanduser().absolute()
        if not self._turns:
            raise SettingsError("nothing was said yet; there is nothing to save")
        if target.suffix != ".jsonl":
            raise SettingsError(f"{path}: does not end in .jsonl; name it so")
        if target not in self._saved and target.exists():
            raise SettingsError(f"{path}: is there already; name another file")
        record = json.dumps({"messages": self._messages()}, ensure_ascii=False, allow_nan=False)
        files.write_atomic(target, f"{record}\n")
        self._saved.add(target)
