"""Chooses the inputs that every format is verified with: rows and positions, prompts, and texts for tokenizers.

A wrong pre-tokenizer in a GGUF file affects few words, so accuracy does not reveal it, but the texts in TEXTS do. They
test grouping of digits and splitting at apostrophes, merging of spaces and line breaks, normalization, bytes of
characters outside of the vocabulary, and recognition of special tokens. Characters that an editor would change or hide
are written as escapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.config.settings import Settings
from ratchet.data import tokenization
from ratchet.data.conversation import IGNORE_INDEX, Conversation
from ratchet.errors import DataError

TEXTS: tuple[str, ...] = (
    "",
    "a",
    " ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces,   three,    four",
    "        eight spaces, then one word",
    "\n",
    "\n\n\n",
    "line one\nline two\n\nparagraph",
    "Windows\r\nline\r\n\r\nends",
    "tab\tbetween\t\twords\n\tand before",
    "space before break \n and after",
    "def area(r: float) -> float:\n    if r < 0:\n        raise ValueError('r')\n    return 3.14159 * r ** 2\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] << 2;\t// shift\n}",
    "SELECT \"name\", COUNT(*) FROM t WHERE x >= 1e-3 AND y != 'z';",
    '{"key": [1, 2.50, null, true], "text": "a\\nb\\u00e9"}',
    "<div class=\"row\" id='x-1'>&nbsp;&amp;</div>",
    "$ grep -rn 'a\\|b' --include=*.py . | wc -l",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case x2y3",
    "0 1 12 123 1234 12345 123456 1234567 12345678901234567890",
    "1,000.50 -3.14 6.02e23 0x1F 1/2 50% $19.99 \u20ac5 3rd 007",
    "2026-02-28T23:59:59Z, 10:45 am, +49 (0)30 123456",
    "https://example.org/a/b_c?q=1&r=%20x#top user.name+tag@mail.example.org",
    "I'm you're he's we'll they'd I've can't 'twas",
    "I'M YOU'RE HE'S WE'LL THEY'D I'VE CAN'T",
    "don\u2019t \u201cquoted\u201d \u2018single\u2019 \u2014 dash \u2013 range \u2026",
    "!!!???... ,,;; --- === *** ### ~~~ ((())) [[]] {{}}",
    "na\u00efve caf\u00e9 \u00fcber Stra\u00dfe \u0141\u00f3d\u017a sm\u00f8rrebr\u00f8d \u0130stanbul",
    "cafe\u0301 nai\u0308ve A\u030a o\u0302\u0323 composed \u00e9 and not e\u0301",
    "z\u0335\u0321\u0322a\u0336\u0316l\u0337\u0317g\u0334\u0318o\u0335",
    "\ufb01ne o\ufb03ce \u2460\u2461 \u33a1 x\u00b2 H\u2082O \u00bd \u2122 \uff21\uff22\uff23\uff11\uff12\uff13",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u3001\u4e16\u754c\u3002\u30ab\u30bf\u30ab\u30ca \uff76\uff80\uff76\uff85",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u3131\u3134\u3137",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0661\u0662\u0663",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd mixed with English",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0967\u0968\u0969",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5",
    "\U0001f600\U0001f602 text \U0001f680\U0001f680\U0001f680",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f469\U0001f3fd\u200d\U0001f4bb \U0001f44d\U0001f3ff",
    "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \u2764\ufe0f 1\ufe0f\u20e3 \U0001f3f3\ufe0f\u200d\U0001f308",
    "no\u00a0break thin\u2009space zero\u200bwidth join\u200der soft\u00adhyphen",
    "\ufeffbyte order mark, \u2028 line and \u2029 paragraph separators, \u3000 wide space",
    "right-to-left \u200f\u202babc\u202c marks",
    "control \x01\x07\x1b[0m characters \x7f",
    "\U0001d54f\U0001d7d8 \U00013080 \U0010fffd rare planes",
    "<s> </s> <unk> <pad> <bos> <eos> <mask>",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|end|> <|eot_id|> <|begin_of_text|>",
    "<start_of_turn>model\nhi<end_of_turn>",
    "[INST] [/INST] <<SYS>> [CLS] [SEP] <|assistant|> <think></think>",
    "<|im_ start|> < |im_end|> <|IM_END|> <|im_end |> <|nothing|>",
    "glued<|im_end|>between and <|im_end|> spaced <|im_end|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ha" * 60,
    "-" * 100,
    " " * 70 + "x",
    "\n" * 20 + "y",
    "\u2581 \u2581\u2581word \u0120token \u010abreak",
)
"""Short texts in many scripts and of many kinds."""

PROBES: tuple[str, ...] = (
    "What can you do?",
    "Say hello in one short sentence.",
    "What is the capital of France?",
    "List three colours, one on each line.",
    "Where is my parcel?",
    "How much is 17 + 25?",
    "Write one sentence about the sea.",
    "Thanks, that is all.",
)
"""Harmless questions that come from no data set, so that answers can be published."""

PROMPT_TEXTS = 32
"""Number of test rows whose prompts are among the texts for tokenizers."""

Metric = Literal["accuracy", "exact_match", "token_f1"]


@dataclass(frozen=True)
class ProbeInputs:
    """Inputs for base + adapter and for each exported format."""

    rows: list[list[int]]
    """Token ids of each row."""
    positions: list[list[int]]
    """Positions of each row, ascending, whose next token is an answer token."""
    targets: list[list[int]]
    """The tokens that follow these positions."""
    prompts: list[list[int]]
    """Token ids of each prompt, which ends where the assistant's answer begins."""
    expected: list[str]
    """The correct answer to each prompt, stripped."""
    metric: Metric
    end_ids: list[int]
    """Tokens that end an answer."""
    max_new_tokens: int
    groups: list[str | None] = field(default_factory=list)
    """Group of each prompt; rows of one group are not independent samples."""
    texts: list[str] = field(default_factory=lambda: list(TEXTS))
    """Difficult texts and prompts that every format's own tokenizer must split into the same tokens."""


def choose_probe_inputs(test: Any, tokenizer: Any, settings: Settings, end_ids: Sequence[int]) -> ProbeInputs:
    """Choose evenly spread test rows. The same rows give the same inputs.

    Prompts come from rows for which the evaluation generates answers, in the same encoding. If the chosen rows have
    more answer positions than `export.parity_positions`, each row keeps an evenly spread share of its positions. Rows
    without an answer token are skipped; other rows are dropped only if that limit is lower than the number of rows.

    Args:
        test: test rows from `token_files.open_split`.
        tokenizer: the tokenizer of base + adapter.
        settings: settings of the project; the sections export and evaluate and the setting prepare.task are read.
        end_ids: tokens that end an answer.

    Raises:
        DataError: no test row has an answer position, or the chat template rejects a row.
    """
    export, count = settings.export, len(test)
    answered = min(count, settings.evaluate.generation_rows or count)
    rows = [test[i] for i in spread_indices(count, export.parity_rows)]
    task_rows = [test[i] for i in spread_indices(answered, export.task_rows)]
    conversations = [Conversation.from_json(row["conversation"]) for row in task_rows]
    with_answers = []
    for row in rows:
        labels = row["labels"]  # position p predicts token p + 1
        if positions := [i - 1 for i, label in enumerate(labels) if i and label != IGNORE_INDEX]:
            with_answers.append((row["input_ids"], positions))
    if not with_answers:
        raise DataError("prepare.split.test: no test row has an answer token to compare; prepare more test rows")
    probe_rows = _thin_positions(with_answers, export.parity_positions)
    prompts = [tokenization.encode_prompt(tokenizer, conversation.context) for conversation in conversations]
    # Without a special token before it, SentencePiece would insert a space at the beginning of a text, which some
    # formats cannot express in a file. In a conversation, other tokens always precede the text.
    prefix = tokenizer.eos_token or ""
    texts = [*(prefix + text for text in TEXTS), *(tokenizer.decode(list(ids)) for ids in prompts[:PROMPT_TEXTS])]
    return ProbeInputs(
        rows=[list(ids) for ids, _ in probe_rows],
        positions=[positions for _, positions in probe_rows],
        targets=[[ids[position + 1] for position in positions] for ids, positions in probe_rows],
        prompts=prompts,
        expected=[
            tokenization.decode_answer(conversation, row["labels"], tokenizer)
            for conversation, row in zip(conversations, task_rows, strict=True)
        ],
        metric=task_metric(settings),
        end_ids=list(end_ids),
        max_new_tokens=settings.evaluate.max_new_tokens,
        groups=[row["group"] for row in task_rows],
        texts=texts,
    )


def task_metric(settings: Settings) -> Metric:
    """Return the metric that scores answers: accuracy for labels, else token F1 if evaluated, else exact match."""
    if settings.prepare.task == "labels":
        return "accuracy"
    return "token_f1" if "token_f1" in settings.evaluate.metrics else "exact_match"


def spread_indices(count: int, limit: int) -> list[int]:
    """Return at most `limit` indices below `count`, ascending and evenly spread."""
    number = min(count, limit)
    return [i * count // number for i in range(number)]


def _thin_positions(rows: Sequence[tuple[Any, list[int]]], budget: int) -> list[tuple[Any, list[int]]]:
    """Reduce the number of positions to a budget: short rows keep all positions, longer rows get equal shares."""
    rows = [rows[i] for i in spread_indices(len(rows), budget)]
    remaining, shares = budget, {}
    for finished, i in enumerate(sorted(range(len(rows)), key=lambda i: (len(rows[i][1]), i))):
        shares[i] = min(len(rows[i][1]), remaining // (len(rows) - finished))
        remaining -= shares[i]
    return [
        (ids, [positions[k] for k in spread_indices(len(positions), shares[i])])
        for i, (ids, positions) in enumerate(rows)
    ]
