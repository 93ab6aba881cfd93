"""Tests a GGUF file in llama.cpp against the same model in transformers."""

import http.client
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_gguf
from chat_families import QWEN_2_5
from ratchet.errors import BaseModelError, DamagedFileError, SettingsError
from ratchet.exporters.verification import probe_inputs
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import LlamaRuntime
from tiny_gguf import expected, greedy

END_OF_TEXT, END_OF_TURN = 1, 3
ROW = [int(one) for one in torch.randint(4, 300, (40,), generator=torch.Generator().manual_seed(5))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # <|endoftext|> is made likely, because llama.cpp would end there.
    return tiny_gguf.directory(tmp_path_factory.mktemp("llama") / "hf", louder={END_OF_TEXT: 3.0})


@pytest.fixture(scope="module")
def path(directory: Path) -> Path:
    return tiny_gguf.write(directory, directory.parent / "model-f32.gguf")


@pytest.fixture(scope="module")
def runtime(path: Path) -> Iterator[LlamaRuntime]:
    with llama_server.open_runtime(path, 1, 256) as found:
        yield found


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def test_log_probabilities_are_those_of_transformers(runtime: LlamaRuntime, model: Any) -> None:
    found = runtime.log_probabilities(ROW, range(len(ROW)))
    assert found.dtype == np.float32
    assert found.shape == (len(ROW), model.config.vocab_size)
    assert np.abs(found - expected(model, ROW)).max() < 2e-5
    assert np.abs(np.exp(found.astype(np.float64)).sum(axis=1) - 1).max() < 1e-6


def test_log_probabilities_do_not_depend_on_earlier_requests(runtime: LlamaRuntime) -> None:
    first = runtime.log_probabilities(ROW, [3, 17, 39])
    runtime.generate(ROW[:9], 8, [END_OF_TURN])
    runtime.log_probabilities(ROW[:30], [28, 29])
    assert np.array_equal(runtime.log_probabilities(ROW, [3, 17, 39]), first)


def test_the_default_cache_hides_what_a_file_is(path: Path, model: Any, runtime: LlamaRuntime) -> None:
    true = expected(model, ROW)
    with llama_server.open_runtime(path, 1, 256, "f16") as served:
        half = np.abs(served.log_probabilities(ROW, range(len(ROW))) - true).max()
    assert half > 20 * np.abs(runtime.log_probabilities(ROW, range(len(ROW))) - true).max()
    assert half < 0.1


@pytest.mark.parametrize(
    ("prompt", "ends"),
    [(ROW[:5], [END_OF_TURN]), (ROW[5:12], [END_OF_TEXT, END_OF_TURN]), (ROW[20:21], [])],
    ids=["go on after llama.cpp's end", "end that is one", "no end"],
)
def test_generation_is_greedy_and_ends_at_the_given_tokens(
    runtime: LlamaRuntime, model: Any, prompt: list[int], ends: list[int]
) -> None:
    found = runtime.generate(prompt, 70, ends)
    assert found == greedy(model, prompt, 70, ends)
    assert found[-1] in ends or len(found) == 70
    assert not set(found[:-1]) & set(ends)


def test_our_ends_count_and_those_of_llama_cpp_do_not(runtime: LlamaRuntime) -> None:
    assert END_OF_TEXT in runtime.generate(ROW[:5], 70, [END_OF_TURN])  # llama.cpp itself would end there
    free = runtime.generate(ROW[:5], 30, [])
    word = next(one for one in free if one not in (END_OF_TEXT, END_OF_TURN))
    assert runtime.generate(ROW[:5], 30, [word]) == free[: free.index(word) + 1]


def test_nothing_is_computed_for_empty_requests(runtime: LlamaRuntime) -> None:
    assert runtime.log_probabilities(ROW, []).shape[0] == 0
    assert runtime.generate(ROW[:5], 0, []) == []


def test_hard_texts_are_many_and_none_twice() -> None:
    assert len(set(probe_inputs.TEXTS)) == len(probe_inputs.TEXTS) >= 40
    assert 6 <= len(set(probe_inputs.PROBES)) == len(probe_inputs.PROBES)


def test_hard_texts_become_the_tokens_of_the_tokenizer(runtime: LlamaRuntime, tokenizer: Any) -> None:
    for text in probe_inputs.TEXTS:
        assert runtime.token_ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)
    assert runtime.token_ids("a<|im_end|>")[-1] == END_OF_TURN


def test_prompts_are_those_of_the_chat_template(runtime: LlamaRuntime, tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where is it?\n  Tell <|im_start|> me. "},
    ]
    ours = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert runtime.prompt_ids(messages) == ours


def test_probes_hold_what_the_chat_answers(path: Path, directory: Path) -> None:
    with llama_server.open_runtime(path, 1, 256, "f16") as served:
        probes = served.probes(probe_inputs.PROBES, 12)
        assert served.probes(probe_inputs.PROBES[::-1], 12)[::-1] == probes
        for probe in probes:
            found = served.generate(probe.prompt_ids, 12, [END_OF_TEXT, END_OF_TURN])
            assert list(probe.answer_ids) == found
            row = [*probe.prompt_ids, *probe.answer_ids]
            places = range(len(probe.prompt_ids) - 1, len(row) - 1)
            best = np.sort(served.log_probabilities(row, places), axis=1)[:, -2:]
            assert probe.margins == pytest.approx(best[:, 1] - best[:, 0], abs=1e-4)
            assert [int(one) for one in served.log_probabilities(row, places).argmax(axis=1)] == found
    assert [probe.question for probe in probes] == list(probe_inputs.PROBES)
    text = AutoTokenizer.from_pretrained(directory)
    whole = [probe for probe in probes if "\ufffd" not in text.decode(probe.answer_ids)]
    assert whole
    assert all(text.decode(probe.answer_ids, skip_special_tokens=True) == probe.answer for probe in whole)


def test_too_long_input_is_refused_not_truncated(path: Path) -> None:
    with llama_server.open_runtime(path, 1, 256) as short:
        with pytest.raises(SettingsError, match="context has 256 tokens, but 301 are needed"):
            short.generate([5] * 300, 1, [])
        with pytest.raises(SettingsError, match="context has 256 tokens"):
            short.log_probabilities([5] * 300, [299])
        with pytest.raises(SettingsError, match="context has 256 tokens"):
            short.probes(["word " * 300], 4)


def test_tokens_outside_the_vocabulary_are_refused(runtime: LlamaRuntime) -> None:
    with pytest.raises(SettingsError, match="invalid tokens"):
        runtime.generate([5, 100_000], 3, [])


def test_nan_weights_are_reported(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(path, tmp_path / "nan.gguf")
    with (tmp_path / "nan.gguf").open("r+b") as stream:
        stream.seek(next(int(one.data_offset) for one in GGUFReader(path).tensors if one.name == "output_norm.weight"))
        stream.write(struct.pack("<f", math.nan))
    with llama_server.open_runtime(tmp_path / "nan.gguf", 1, 256) as found:
        with pytest.raises(DamagedFileError, match=r"returned probabilities of 0 tokens, expected \d+"):
            found.log_probabilities([5, 6], [1])
        with pytest.raises(DamagedFileError, match="are NaN"):
            found.probes(["hello"], 3)


def test_a_template_that_fails_on_a_conversation_is_reported(directory: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'forbidden' in m['content'] %}{{ raise_exception('not that') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    with (
        llama_server.open_runtime(tiny_gguf.write(tmp_path / "hf", tmp_path / "m.gguf"), 1, 256) as found,
        pytest.raises(BaseModelError, match=r"not that.*base\.chat_template"),
    ):
        found.prompt_ids([{"role": "user", "content": "forbidden"}])


def test_tools_and_their_calls_reach_the_chat_template(directory: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = QWEN_2_5
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": parameters}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
    messages = [
        {"role": "user", "content": "How is it in Köln?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "wet", "name": "weather"},
    ]  # fmt: skip
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "weather" in expected
    with llama_server.start_server(tiny_gguf.write(tmp_path / "hf", tmp_path / "m.gguf"), 1, 256) as server:
        assert server.template(messages, tools) == expected
        assert "weather" not in server.template(messages[:1])


def test_the_name_has_the_llama_cpp_version(runtime: LlamaRuntime) -> None:
    assert runtime.name == llama_server.get_version()
    assert runtime.name.startswith("llama.cpp (xllamacpp 20")


def test_the_openai_compatible_endpoint_answers_anybody_on_this_machine(path: Path) -> None:
    with llama_server.start_server(path, 1, 256) as server:
        reply = server.chat([{"role": "user", "content": "Where is my parcel?"}], 6)
        connection = http.client.HTTPConnection("127.0.0.1", int(server.address.rpartition(":")[2]))
        connection.request("GET", "/health", headers={"Origin": "http://example.org"})
        response = connection.getresponse()
        response.read()
        connection.close()
    assert 0 < len(reply.ids) <= 6
    assert response.status == 200
    assert response.getheader("Access-Control-Allow-Origin") == ""  # no web page may read the answer


def test_the_runtime_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from ratchet.models.runtimes import llama_process, llama_server\n"
        "print(*(name for name in ('torch', 'transformers', 'mlflow', 'xllamacpp') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
