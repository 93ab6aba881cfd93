"""A chat template in the language that Ollama understands.

Ollama reads no Jinja: a GGUF file's own template is used only where it equals one of a list (ollama/ollama, issues
10222 and 6371), and else a prompt goes to the model bare, without a word of warning. So the template is rendered here
with marks for texts, what stands around them is read off, and written as a Go template over `.Messages`
(https://docs.ollama.com/modelfile). What was read off must then give, for conversations of several shapes, what Jinja
gives, to the last character; a template that does more than write texts between literals has no Ollama form.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]

_SHAPES = ("u", "uau", "uauau", "su", "suau", "suauau")
"""Conversations, a letter a role, on which the Go template must write what Jinja writes."""
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


@dataclass(frozen=True)
class Literals:
    """What stands around the texts of a conversation. (before, after) for each role."""

    opening: str
    """Before the first message where there is no system message, such as a default system message."""
    system: tuple[str, str] | None
    """None: the template takes no system message."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str
    """After the last message: the assistant is about to speak."""


class _UnwritableError(Exception):
    """The template is no row of texts between literals."""


class _Generation(Extension):
    """transformers' `{% generation %}` marks what is learned; it writes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template(jinja: str, tokens: Mapping[str, str], adds_first: bool) -> str | None:
    """The Go template for a Jinja chat template, or None where there is none that writes the same.

    Args:
        jinja: from the base, so it is rendered in a sandbox, as transformers does.
        tokens: bos_token and the like, by name.
        adds_first: the tokenizer puts bos_token before every text by itself, so the template must not.
    """
    try:
        compiled = _environment().from_string(jinja)
        found = _read(compiled, tokens)
        for shape in _SHAPES if found.system else [shape for shape in _SHAPES if "s" not in shape]:
            conversation = _conversation(shape)
            if written(found, conversation) != _render(compiled, tokens, conversation):
                return None
    except (
        jinja2.TemplateError,
        _UnwritableError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ):
        return None  # what a template may do wrong in the sandbox; the caller says what that means
    text = _go(found, tokens.get("bos_token", "") if adds_first else "")
    return None if '"""' in text else text


def written(literals: Literals, conversation: Sequence[Message]) -> str:
    """What the Go template writes: the meaning of `_go`, for comparison."""
    around = {"system": literals.system, "user": literals.user, "assistant": literals.assistant}
    text = "" if any(message["role"] == "system" for message in conversation) else literals.opening
    for message in conversation:
        before, after = around[message["role"]] or ("", "")
        text += before + message["content"] + after
    return text + literals.prompt


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up (utils/chat_template_utils.py)."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return made


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _render(
    compiled: jinja2.Template, tokens: Mapping[str, str], conversation: Sequence[Message], go_on: bool = True
) -> str:
    facts: dict[str, Any] = {**tokens, "tools": None, "documents": None}
    return compiled.render(messages=[dict(one) for one in conversation], add_generation_prompt=go_on, **facts)


def _conversation(shape: str) -> list[Message]:
    return [{"role": _ROLES[letter], "content": f"slot{number}of{letter}"} for number, letter in enumerate(shape)]


def _around(compiled: jinja2.Template, tokens: Mapping[str, str], shape: str, go_on: bool = True) -> list[str]:
    """The literals of a conversation: before the first text, between texts, after the last."""
    conversation = _conversation(shape)
    rest, found = _render(compiled, tokens, conversation, go_on), []
    for message in conversation:
        before, mark, rest = rest.partition(message["content"])
        if not mark:
            raise _UnwritableError(f"a text of role {message['role']} is not written")
        found.append(before)
    return [*found, rest]


def _read(compiled: jinja2.Template, tokens: Mapping[str, str]) -> Literals:
    opening, asked, answered, last = _around(compiled, tokens, "uau")
    user_after = _around(compiled, tokens, "u", go_on=False)[1]
    assistant_after = _around(compiled, tokens, "ua", go_on=False)[2]
    user_before = _without(answered, assistant_after, at_end=False)
    try:
        first, second, *_ = _around(compiled, tokens, "su")
        system = (first, _without(second, user_before, at_end=True))
    except jinja2.TemplateError:  # it refuses system messages, and Ollama then leaves them out
        system = None
    return Literals(
        opening=_without(opening, user_before, at_end=True), system=system, user=(user_before, user_after),
        assistant=(_without(asked, user_after, at_end=False), assistant_after),
        prompt=_without(last, user_after, at_end=False),
    )  # fmt: skip


def _without(text: str, part: str, at_end: bool) -> str:
    if not (text.endswith(part) if at_end else text.startswith(part)):
        raise _UnwritableError(f"{part!r} is not at its place in {text!r}")
    return text.removesuffix(part) if at_end else text.removeprefix(part)


def _go(found: Literals, first_token: str) -> str:
    system = found.system
    opening = found.opening.removeprefix(first_token)
    branches = []
    if system is not None:
        branches.append(("system", (system[0].removeprefix(first_token), system[1])))
        opening = f"{{{{ if not .System }}}}{_literal(opening)}{{{{ end }}}}" if opening else ""
    else:
        opening = _literal(opening)
    branches += [("user", found.user), ("assistant", found.assistant)]
    text = opening + "{{ range .Messages }}"
    for number, (role, (before, after)) in enumerate(branches):
        text += f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}'
        text += _literal(before) + "{{ .Content }}" + _literal(after)
    return text + "{{ end }}{{ end }}" + _literal(found.prompt)


def _literal(text: str) -> str:
    """Text that Go writes as it is."""
    return text.replace("{{", '{{ "{{" }}')
