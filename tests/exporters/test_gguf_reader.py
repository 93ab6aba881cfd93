"""Tests transformers' own GGUF loader on files of real models."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import tiny_gguf
from ratchet.exporters.gguf import reader
from ratchet.models.memory import capacity

ROWS = [[5, 6, 7, 8, 9, 10, 11], [20, 30, 40]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.directory(tmp_path_factory.mktemp("second_reader") / "hf")


@pytest.fixture(scope="module")
def path(directory: Path) -> Path:
    return tiny_gguf.write(directory, directory.parent / "model.gguf")


def asked(directory: Path) -> Callable[[Sequence[Sequence[int]]], list[torch.Tensor]]:
    def logits(rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            return [model(torch.tensor([list(row)])).logits[0] for row in rows]

    return logits


def test_an_unquantized_file_equals_the_model(path: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reader.compare_logits(path, directory, ROWS, asked(directory)) == (0.0, None)
    assert "de-quantizing" not in capsys.readouterr().err


def test_the_error_of_quantization_is_measured(path: Path, directory: Path) -> None:
    half = tiny_gguf.write(directory, path.with_name("half.gguf"), "f16")
    eighth = tiny_gguf.write(directory, path.with_name("q8_0.gguf"), "q8_0")
    (a, _), (b, _) = (reader.compare_logits(one, directory, ROWS, asked(directory)) for one in (half, eighth))
    assert 0 < a < b < 5


def test_another_model_is_detected(path: Path, directory: Path, tmp_path: Path) -> None:
    other = tiny_gguf.directory(tmp_path / "other", seed=1)
    found, note = reader.compare_logits(path, other, ROWS, asked(other))
    assert found > 1
    assert note is None


def test_settings_that_the_loader_loses_come_from_the_config(tmp_path: Path) -> None:
    vocabulary = len(tiny_gguf.tokenizer())
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    directory = tmp_path / "hf"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tiny_gguf.tokenizer().save_pretrained(directory)
    path = tiny_gguf.write(directory, tmp_path / "model.gguf")
    found, note = reader.compare_logits(path, directory, ROWS, asked(directory))
    assert found == 0.0
    assert "does not read head_dim from the file" in note


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "missing keys: model.layers.1.self_attn.q_proj.weight"),
        (b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lemma", "lemma"),
        (b"GGUF", b"hell", "magic"),
    ],
    ids=["tensor missing", "unknown architecture", "another format"],
)
def test_unreadable_files_have_a_note(
    path: Path, directory: Path, tmp_path: Path, old: bytes, new: bytes, said: str
) -> None:
    bad = tiny_gguf.patched(path, tmp_path / "bad.gguf", old, new)
    found, why = reader.compare_logits(bad, directory, ROWS, lambda rows: pytest.fail("asked in vain"))
    assert found is None
    assert said in why


def test_skipped_tensors_are_detected(tmp_path: Path) -> None:
    directory = tiny_gguf.directory(tmp_path / "hf", attention_bias=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.5)
    model.save_pretrained(directory)
    path = tiny_gguf.write(directory, tmp_path / "model.gguf")
    assert reader.compare_logits(path, directory, ROWS, asked(directory)) == (
        0.0, "transformers' GGUF loader does not read attention_bias from the file; the values came from config.json",
    )  # fmt: skip


def test_nothing_is_loaded_if_memory_is_short(path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = capacity.MemoryCapacity(total_bytes=10**9, available_bytes=1000)
    monkeypatch.setattr(capacity, "measure_host", lambda: little)
    found, why = reader.compare_logits(path, directory, ROWS, asked(directory))
    assert found is None
    assert "GB of memory" in why
