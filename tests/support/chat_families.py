"""Chat templates of a dozen model families, with matching tokenizers."""
# ruff: noqa: RUF001 (DeepSeek's control tokens are written with a fullwidth bar)

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ratchet.data.conversation import Message

WORDS = (
    "the card is lost the card is blocked hello world user assistant system [INST] [/INST] ### Response: USER: "
    "ASSISTANT: one two three first second third answer question <|user|> <|assistant|> <<SYS>> <</SYS>> it was so"
)


@dataclass(frozen=True)
class Family:
    """A chat template and the properties of the models that use it."""

    template: str
    end: str
    """Token at the end of an answer."""
    special: tuple[str, ...]
    """Control tokens other than `end`. The first one is BOS, if the family has a BOS token."""
    bos: str | None = None
    pieces: bool = False
    """The tokenizer uses SentencePiece instead of bytes: words begin with ▁, and bytes are a fallback."""
    system: Literal["written", "refused", "first"] = "written"
    lead: str = ""
    """Text that the model writes between the prompt and the answer."""
    last_lead: str | None = None
    """Text before the last answer, if it differs from `lead`."""
    trims: bool = False
    """The template strips white space from answers."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not control tokens."""
    eos: str | None = None
    """The tokenizer's eos_token, if it differs from `end`."""


LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' -%}
{%- set loop_messages = messages[1:] -%}{%- set system_message = messages[0]['content'] -%}
{%- else -%}
{%- set loop_messages = messages -%}{%- set system_message = false -%}
{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- if loop.index0 == 0 and system_message != false -%}
{%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] -%}
{%- else -%}{%- set content = message['content'] -%}{%- endif -%}
{%- if message['role'] == 'user' -%}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
{%- elif message['role'] == 'assistant' -%}{{- ' ' + content.strip() + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}"""

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}
{{- "<|eot_id|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN_2_5 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
{%- else %}{{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}{%- endif %}
{{- "\\n\\n# Tools\\n\\nYou may call one or more functions.\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first)
    or (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN_3 = """\
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string
    and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{{- content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
{%- endif %}
{%- if message["role"] == "user" %}
{%- if loop.last and system_message is defined or message == user_messages[-1] and system_message is defined %}
{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
{%- else %}{{- raise_exception("Only user and assistant roles are supported") }}{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PHI_3 = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}\
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}\
{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}\
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = 'A chat between a curious user and an artificial intelligence assistant.' %}{% endif %}\
{{ bos_token + system_message }}{% for message in loop_messages %}{% if message['role'] == 'user' %}\
{{ ' USER: ' + message['content'].strip() }}{% elif message['role'] == 'assistant' %}\
{{ ' ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""

ALPACA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{{ messages[0]['content'] + '\\n\\n' }}{% else %}{% set loop_messages = messages %}\
{{ 'Below is an instruction that describes a task. Write a response that completes the request.\\n\\n' }}{% endif %}\
{% for message in loop_messages %}{% if message['role'] == 'user' %}\
{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% else %}\
{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"""

DEEPSEEK_R1 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor -%}\
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

_IM = ("<|endoftext|>", "<|im_start|>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
_THINK = ("<think>", "</think>")
_TOOLS = ("<tool_call>", "</tool_call>")
_BOS3, _S = "<|begin_of_text|>", "<s>"

FAMILIES = {
    "Llama 2": Family(LLAMA_2, "</s>", (_S,), _S, pieces=True, lead=" ", trims=True),
    "Llama 3": Family(LLAMA_3, "<|eot_id|>", _HEADERS, _BOS3, trims=True),
    "ChatML": Family(CHATML, "<|im_end|>", _IM),
    "ChatML with generation marks": Family(MARKED, "<|im_end|>", _IM),
    "Qwen 2.5": Family(QWEN_2_5, "<|im_end|>", _IM, plain=_TOOLS),
    "Qwen 3": Family(QWEN_3, "<|im_end|>", _IM, last_lead="<think>\n\n</think>\n\n", plain=_THINK),
    "Mistral": Family(MISTRAL, "</s>", (_S, "[INST]", "[/INST]"), _S, lead=" ", trims=True),
    "Mistral in pieces": Family(MISTRAL, "</s>", (_S, "[INST]", "[/INST]"), _S, pieces=True, lead=" ", trims=True),
    "Gemma": Family(
        GEMMA, "<end_of_turn>", ("<bos>", "<eos>", "<start_of_turn>"), "<bos>", system="refused", trims=True
    ),
    "Phi 3": Family(PHI_3, "<|end|>", (_S, "<|system|>", "<|user|>", "<|assistant|>"), _S, pieces=True, eos=_IM[0]),
    "Zephyr": Family(ZEPHYR, "</s>", (_S,), _S, pieces=True),
    "Vicuna": Family(VICUNA, "</s>", (_S,), _S, pieces=True, lead=" ", trims=True),
    "Alpaca": Family(ALPACA, "</s>", (_S,), _S),
    "DeepSeek R1": Family(
        DEEPSEEK_R1,
        "<｜end▁of▁sentence｜>",
        ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜begin▁of▁sentence｜>",
        plain=_THINK,
    ),
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def assistant(text: Any, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family. The tokenizer is shared, so tests must not change it."""
    family = FAMILIES[name]
    special = (*family.special, family.end, *family.plain)
    return tokenizer(family.template, family.eos or family.end, special, family.bos, pieces=family.pieces)


def tokenizer(
    template: str, eos: str, special: tuple[str, ...], bos: str | None = None, merges: int = 80, pieces: bool = False
) -> PreTrainedTokenizerFast:
    """Create a small BPE tokenizer that can encode any text."""
    control = [token for token in dict.fromkeys((*special, eos)) if token not in (*_THINK, *_TOOLS)]
    bpe = _in_pieces(control, merges) if pieces else _of_bytes(control, merges)
    bpe.add_tokens([token for token in special if token in (*_THINK, *_TOOLS)])
    if bos:  # Like the real tokenizers, add a second BOS if a caller tokenizes the template's text like any other text
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
        )
    ends: dict[str, Any] = {"eos_token": eos, "pad_token": eos, "unk_token": "<unk>" if pieces else None}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=template, bos_token=bos, additional_special_tokens=control, **ends
    )


def _of_bytes(control: list[str], merges: int) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(control) + merges,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS] * 5, trainer)
    return bpe


def _in_pieces(control: list[str], merges: int) -> Tokenizer:
    """Train a tokenizer like that of Llama 2: ▁ replaces a space and precedes each word; characters without a piece are
    encoded as bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))  # noqa: S106 (no password)
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # a piece does not extend beyond a word
    words = WORDS.replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=60 + merges, special_tokens=["<unk>"], show_progress=False, max_token_length=8
    )
    trained.train_from_iterator([f"▁{words}"] * 5, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*model["vocab"], *map(_byte, range(256))]))}
    bpe = Tokenizer(
        models.BPE(
            vocabulary,
            [tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",  # noqa: S106
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens(["<unk>", *control])
    return bpe


def _byte(value: int) -> str:
    return f"<0x{value:02X}>"
