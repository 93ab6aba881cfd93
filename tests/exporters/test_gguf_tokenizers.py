"""Tests that llama.cpp's token ids equal transformers'; tokenizers that llama.cpp lacks are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GemmaTokenizer, PreTrainedTokenizerFast

import gguf_models
from ratchet.errors import BaseModelError
from ratchet.exporters.gguf import tokenizer as gguf_vocabulary
from ratchet.exporters.gguf import tokenizer as pretokenizers
from ratchet.exporters.gguf import writer
from ratchet.exporters.verification.probe_inputs import TEXTS
from ratchet.models.runtimes import llama_server

DIGITS = pre_tokenizers.Digits(individual_digits=True)
MARKED = (
    "a<|im_start|>user\nhi<|im_end|> x", "<tool>  a <tool>\n", "<|im_start|><|im_start|> ", "zqxj zqxj zqxjs",
    " " * 50 + "x", "\n" * 20, "'''S 'Ll", "A" * 300,
)  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "gpt-2": {},
    "smollm": {"steps": [DIGITS], "regex": True},
    "llama-bpe": {"steps": [pretokenizers.LLAMA3], "whole_words": True},
    "smaug-bpe": {"steps": [pretokenizers.LLAMA3]},
    "qwen2": {"steps": [pretokenizers.QWEN2]},
    "qwen35": {"steps": [pretokenizers.QWEN35]},
    "deepseek-v3": {"steps": pretokenizers.DEEPSEEK3},
    "deepseek-coder": {"steps": [*pretokenizers.DEEPSEEK_CODER[:-1], DIGITS]},
}
QUESTION = [{"role": "user", "content": "it's  a 12345\n"}]


def exported(tokenizer: Any, tmp_path: Path, family: str = "llama") -> tuple[Any, Path, tuple[str, ...]]:
    """Write a GGUF file; return the tokenizer reloaded by transformers, the file, and its notes."""
    model = gguf_models.make(family, seed=1, vocab_size=gguf_models.ROWS, num_hidden_layers=1)
    directory = gguf_models.save(model, tokenizer, tmp_path / "hf")
    file = tmp_path / "model.gguf"
    notes = writer.write_gguf(directory, file, "f16", gguf_models.nothing)
    return AutoTokenizer.from_pretrained(directory), file, notes


def cut_otherwise(runtime: llama_server.LlamaRuntime, tokenizer: Any, texts: Sequence[str]) -> list[str]:
    due = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [text for text, ids in zip(texts, due, strict=True) if runtime.token_ids(text) != ids]


def assert_same_ids(file: Path, tokenizer: Any, texts: Sequence[str], chat: Any = None) -> None:
    """Check that llama.cpp and transformers give equal token ids for these texts and a conversation."""
    with llama_server.open_runtime(file, 1, 64) as runtime:
        assert cut_otherwise(runtime, tokenizer, texts) == []
        if chat:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            assert runtime.prompt_ids(chat) == ids


@pytest.mark.parametrize("name", RULES)
def test_byte_level_tokenizers_get_the_right_rule(name: str, tmp_path: Path) -> None:
    tokenizer, file, notes = exported(gguf_models.byte_level(**RULES[name]), tmp_path)
    assert notes == ()
    assert gguf_vocabulary.read_vocabulary(tmp_path / "hf", gguf_models.ROWS).pre == name
    assert_same_ids(file, tokenizer, [*TEXTS, *MARKED, *gguf_models.nonsense()], QUESTION)


def test_a_template_may_name_a_token_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    """transformers renders nothing for it; llama.cpp would use token 11."""
    tokenizer = gguf_models.byte_level()
    tokenizer.chat_template = "{{ bos_token }}" + gguf_models.CHAT
    tokenizer, file, _ = exported(tokenizer, tmp_path)
    assert_same_ids(file, tokenizer, [], QUESTION)


def test_a_wrong_rule_changes_tokens(tmp_path: Path) -> None:
    """The texts distinguish llama.cpp's rules; otherwise the test above would prove nothing."""
    tokenizer, file, _ = exported(gguf_models.byte_level(steps=[pretokenizers.QWEN2]), tmp_path)
    content = file.read_bytes()
    assert content.count(b"\x05\0\0\0\0\0\0\0qwen2") == 1
    file.write_bytes(content.replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0gpt-2"))
    with llama_server.open_runtime(file, 1, 64) as runtime:
        assert len(cut_otherwise(runtime, tokenizer, TEXTS)) > 5


@pytest.mark.parametrize(
    ("made", "said", "texts"),
    [
        ({"steps": [pretokenizers.QWEN2], "nfc": True}, "compose", ["cafe\u0301"]),
        ({"steps": [pretokenizers.TEKKEN], "whole_words": True}, "upper and lower case", ["aÜbung"]),
        ({"steps": [pretokenizers.O200K]}, "upper and lower case", ["aÜbung"]),
    ],
    ids=["nfc", "tekken", "gpt-4o"],
)
def test_approximate_rules_have_a_note(made: dict[str, Any], said: str, texts: list[str], tmp_path: Path) -> None:
    tokenizer, file, notes = exported(gguf_models.byte_level(**made), tmp_path)
    assert said in notes[0]
    with llama_server.open_runtime(file, 1, 64) as runtime:
        assert cut_otherwise(runtime, tokenizer, texts) == texts
        assert len(cut_otherwise(runtime, tokenizer, TEXTS)) <= 3


BOS = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"
PLAIN = (
    "{% for m in messages %}{{ '<|user|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}{{ '<|assistant|>\\n' }}"
)
END = "</s>"


def pieces(tmp_path: Path, template: str | None, **settings: Any) -> Any:
    folder = tmp_path / "trained"
    folder.mkdir()
    return gguf_models.pieces(folder, template, **settings)


@pytest.mark.parametrize("template", [BOS, PLAIN], ids=["begins special", "begins with words"])
def test_a_space_before_the_first_word_is_correct_in_conversations(template: str, tmp_path: Path) -> None:
    tokenizer, file, notes = exported(pieces(tmp_path, template), tmp_path)
    assert "begins without a special token; llama.cpp inserts none" in " ".join(notes)
    behind = [END + text for text in (*TEXTS, *gguf_models.nonsense())]
    assert_same_ids(file, tokenizer, behind, QUESTION)


def test_without_a_template_it_is_correct_in_plain_texts(tmp_path: Path) -> None:
    tokenizer, file, notes = exported(pieces(tmp_path, None, add_bos_token=True, add_eos_token=True), tmp_path)
    assert "llama.cpp also inserts one after special tokens" in " ".join(notes)
    with llama_server.open_runtime(file, 1, 64) as runtime:
        plain = [text for text in TEXTS if not text.startswith((" ", "▁")) and "<" not in text]
        assert cut_otherwise(runtime, tokenizer, plain) == []
        whole = runtime._server.tokenize("a", add_special=True)
    assert whole == tokenizer("a")["input_ids"] == [1, *tokenizer("a", add_special_tokens=False)["input_ids"], 2]


def test_a_space_before_nothing(tmp_path: Path) -> None:
    tokenizer, file, notes = exported(pieces(tmp_path, BOS, add_prefix_space=False), tmp_path)
    assert notes == ()
    assert_same_ids(file, tokenizer, [*TEXTS, *gguf_models.nonsense()])


def test_a_space_before_everything(tmp_path: Path) -> None:
    backend = pieces(tmp_path, None).backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    tokenizer, file, notes = exported(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END), tmp_path)
    assert notes == ()
    assert_same_ids(file, tokenizer, [*TEXTS, *gguf_models.nonsense()])


def test_gemma_has_runs_of_spaces_and_breaks(tmp_path: Path) -> None:
    written = json.loads(pieces(tmp_path, None).backend_tokenizer.to_str())["model"]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary = {text: i for i, text in enumerate([*names, *list(written["vocab"])[3:]])}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[tuple(one) for one in written["merges"]])
    runs = [AddedToken("▁" * width, normalized=True, special=False) for width in (2, 3)]
    tokenizer.add_tokens([*runs, AddedToken("\n\n", normalized=False, special=False)])
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    tokenizer, file, notes = exported(tokenizer, tmp_path, "gemma")
    assert "as a space, llama.cpp as a letter" in notes[0]
    plain = [one for one in TEXTS if "▁" not in one]
    assert_same_ids(file, tokenizer, [*plain, "a    b     c\n\n\n"], QUESTION)


PHI = "{% for m in messages %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}{{ '<|assistant|>\n' }}"


def stripping(tmp_path: Path) -> Any:
    """Return a tokenizer with Phi-3's special tokens: all except three absorb the spaces after them."""
    tokenizer = pieces(tmp_path, PHI)
    strip = {"rstrip": True, "normalized": False, "special": True}
    names = [AddedToken(name, **strip) for name in ("<|user|>", "<|end|>", "<|assistant|>")]
    named = {"eos_token": AddedToken(END, **strip)}
    tokenizer.add_special_tokens(
        named | {"additional_special_tokens": [*names, AddedToken("<|endoftext|>", normalized=False, special=True)]}
    )
    return tokenizer


def test_special_tokens_that_absorb_spaces(tmp_path: Path) -> None:
    tokenizer, file, _ = exported(stripping(tmp_path), tmp_path)
    texts = ["<|user|>\n hi<|end|>\n<|assistant|>\n\n x<|endoftext|> y <s> z</s>  \t\n w", "<|user|> \n"]
    assert_same_ids(file, tokenizer, texts, QUESTION)


def test_the_name_decides_whether_spaces_are_absorbed() -> None:
    assert writer.gguf_model_name("Phi-3-mini, fine-tuned", True) == "Phi-3-mini, fine-tuned"
    assert writer.gguf_model_name("Phi-3-mini, fine-tuned", False) == "Phi 3-mini, fine-tuned"
    assert writer.gguf_model_name("Something", True) == "Something (Phi-3)"
    assert writer.gguf_model_name("Something", False) == "Something"


def test_the_name_of_another_model_absorbs_no_spaces(tmp_path: Path) -> None:
    model = gguf_models.make("llama", vocab_size=gguf_models.ROWS, num_hidden_layers=1)
    directory = gguf_models.save(model, gguf_models.byte_level(), tmp_path)
    (directory / "README.md").write_text("---\n---\n# Phi-3, in name only\n")
    writer.write_gguf(directory, tmp_path / "model.gguf", "f16", gguf_models.nothing)
    assert_same_ids(tmp_path / "model.gguf", AutoTokenizer.from_pretrained(directory), ["<|im_end|>  a"])


def test_an_entry_beyond_the_tokenizer_has_no_text(tmp_path: Path) -> None:
    vocabulary = gguf_vocabulary.read_vocabulary(saved(gguf_models.byte_level(), tmp_path), gguf_models.ROWS)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == gguf_models.ROWS
    assert vocabulary.tokens[-1] == "[PAD639]"


def saved(tokenizer: Any, tmp_path: Path, **generation: Any) -> Path:
    directory = tmp_path / "hf"
    directory.mkdir(exist_ok=True)
    gguf_models.config("llama", vocab_size=gguf_models.ROWS).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def changed(tokenizer: Any, change: Any) -> Any:
    """Return the same tokenizer with a changed tokenizer.json."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    change(written)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token=tokenizer.eos_token, chat_template=CHAT
    )


CHAT = gguf_models.CHAT


def test_three_end_tokens_are_written_and_others_are_noted(tmp_path: Path) -> None:
    tokenizer = gguf_models.byte_level()
    names = ["<e1>", "<e2>", "<e3>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    ids = tokenizer.convert_tokens_to_ids(names)
    eos = tokenizer.eos_token_id
    vocabulary = gguf_vocabulary.read_vocabulary(
        saved(tokenizer, tmp_path, eos_token_id=[eos, *ids[:2]]), gguf_models.ROWS
    )
    assert [vocabulary.special[part] for part in ("eos", "eot", "eom")] == [eos, *ids[:2]]
    assert vocabulary.notes == ()
    vocabulary = gguf_vocabulary.read_vocabulary(saved(tokenizer, tmp_path, eos_token_id=[eos, *ids]), gguf_models.ROWS)
    assert vocabulary.notes == ("llama.cpp does not end an answer at <e3>",)


def test_a_template_without_the_token_before_a_text_turns_it_off(tmp_path: Path) -> None:
    tokenizer = pieces(tmp_path, PLAIN, add_bos_token=True)
    vocabulary = gguf_vocabulary.read_vocabulary(saved(tokenizer, tmp_path), gguf_models.ROWS)
    assert not vocabulary.add_bos
    assert any("<s> is not put before texts" in note for note in vocabulary.notes)
    tokenizer.chat_template = BOS
    assert gguf_vocabulary.read_vocabulary(saved(tokenizer, tmp_path), gguf_models.ROWS).add_bos


def test_a_template_that_fails_is_refused(tmp_path: Path) -> None:
    tokenizer = gguf_models.byte_level()
    tokenizer.chat_template = "{{ raise_exception('only with tools') }}"
    with pytest.raises(BaseModelError, match="chat template fails for a plain question: only with tools"):
        writer.require_exportable(saved(tokenizer, tmp_path), ["f16"], False)


def punctuated(written: dict[str, Any]) -> None:
    step = {"type": "Punctuation", "behavior": "Contiguous"}
    written["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, written["pre_tokenizer"]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda written: written.update(normalizer={"type": "Lowercase"}), r"it normalizes texts by Lowercase"),
        (lambda written: written["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
        (lambda written: written["added_tokens"][0].update(lstrip=True), "has lstrip"),
        (lambda written: written["added_tokens"][0].update(rstrip=True), "absorbs the spaces after it"),
        (lambda written: written["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (lambda written: written["model"]["vocab"].pop("ÿ"), "1 of 256 bytes"),
        (punctuated, "its pre-tokenizer has the step type Punctuation"),
    ],
    ids=["lower", "prefix", "lstrip", "some swallow", "suffix", "byte missing", "punctuation"],
)
def test_features_that_llama_cpp_lacks_are_refused_by_name(change: Any, said: str, tmp_path: Path) -> None:
    directory = saved(changed(gguf_models.byte_level(), change), tmp_path)
    with pytest.raises(BaseModelError, match="GGUF cannot represent this tokenizer.*" + said):
        writer.require_exportable(directory, ["f16"], False)


def test_an_unknown_pattern_is_refused_and_shown(tmp_path: Path) -> None:
    directory = saved(gguf_models.byte_level(steps=[r"\p{N}{1,2}|\s+"]), tmp_path)
    with pytest.raises(
        BaseModelError, match=r"splits texts by \\p\{N\}\{1,2\}\|\\s\+, and llama\.cpp has no equivalent"
    ):
        writer.require_exportable(directory, ["f16"], False)


def test_ignore_merges_matters_only_for_words_that_merges_do_not_reach(tmp_path: Path) -> None:
    reached = changed(gguf_models.byte_level(), lambda written: written["model"].update(ignore_merges=True))
    assert gguf_vocabulary.read_vocabulary(saved(reached, tmp_path), gguf_models.ROWS).pre == "gpt-2"
    with pytest.raises(BaseModelError, match="rule `gpt-2` with ignore_merges: true"):
        writer.require_exportable(saved(gguf_models.byte_level(whole_words=True), tmp_path), ["f16"], False)


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"),  # noqa: S106
        models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0),
    ],
    ids=["WordPiece", "Unigram"],
)
def test_other_kinds_are_refused(model: Any, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token=END, chat_template=CHAT)
    with pytest.raises(BaseModelError, match=r"cannot represent this tokenizer: its model type is (WordPiece|Unigram)"):
        writer.require_exportable(saved(tokenizer, tmp_path), ["f16"], False)


def test_pieces_with_missing_merges_are_refused(tmp_path: Path) -> None:
    def fewer(written: dict[str, Any]) -> None:
        made: set[str] = set()
        first = [one for one in written["model"]["merges"] if "".join(one) not in made and not made.add("".join(one))]
        assert len(first) < len(written["model"]["merges"])
        written["model"]["merges"] = first

    with pytest.raises(BaseModelError, match="it never merges"):
        writer.require_exportable(saved(changed(pieces(tmp_path, False), fewer), tmp_path), ["f16"], None)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"has no row in the embedding, which has 300"):
        gguf_vocabulary.read_vocabulary(saved(gguf_models.byte_level(), tmp_path), 300)
