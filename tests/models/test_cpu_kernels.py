"""Tests the kernels for CPUs against formulas in float64, and what happens where they cannot be compiled."""

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama import modeling_llama

import families
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.evaluation import comparability
from ratchet.models import adapters
from ratchet.models.chunked_loss import compute_loss
from ratchet.models.cpu_kernels import attention, library, operators
from ratchet.models.cpu_kernels.attention import Span
from ratchet.models.device import Model
from ratchet.models.fused_operators import _GatedUnit, _RootMeanSquareNorm
from ratchet.models.loss import SequenceBatch
from ratchet.models.memory.trace import workspace_bytes
from ratchet.training.profiler import _flop_formulas

needs_kernels = pytest.mark.skipif(
    not library.load_kernels().is_available and not os.environ.get("CI"), reason=library.load_kernels().text
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Attention.


def spans_of(sequences: list[list[int]]) -> list[Span]:
    """Return the spans of rows of these lengths; 0 stands for three tokens that see only themselves."""
    found: list[Span] = []
    for sequence, lengths in enumerate(sequences):
        start = 0
        for length in lengths:
            end = start + (length or 3)
            found.append((sequence, start, end, length > 0))
            start = end
    return found


def expected_attention(query: Tensor, key: Tensor, value: Tensor, spans: list[Span], scale: float) -> Tensor:
    """Return attention [sequences, positions, heads, width] by its formula."""
    output = torch.zeros_like(query)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    for sequence, start, end, is_row in spans:
        q, k, v = (part[sequence, :, start:end] for part in (query, key, value))
        seen = torch.ones(end - start, end - start).tril() if is_row else torch.eye(end - start)
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(seen == 0, -math.inf)
        output[sequence, :, start:end] = scores.softmax(-1) @ v
    return output.transpose(1, 2)


def heads_of(sequences: int, heads: int, positions: int, width: int, seed: int) -> Tensor:
    """Draw heads as transformers lays them out: positions before heads."""
    return drawn(sequences, positions, heads, width, seed=seed).transpose(1, 2)


@needs_kernels
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "sequences"),
    [
        (1, 1, 16, [[2, 1], [1, 1, 1]]),
        (2, 2, 32, [[33, 15], [48]]),
        (4, 1, 48, [[7, 0, 50, 0], [12, 13, 14, 24]]),
        (6, 2, 64, [[150, 5, 1, 100]]),
        (2, 1, 256, [[97], [97], [97]]),
        (8, 8, 80, [[500]]),
    ],
)
def test_attention_and_its_gradients_are_those_of_the_formula(
    heads: int, key_heads: int, width: int, sequences: list[list[int]]
) -> None:
    spans = spans_of(sequences)
    positions = max(end for _, _, end, _ in spans)
    assert sum(end - start for _, start, end, _ in spans) == len(sequences) * positions
    parts = [heads_of(len(sequences), count, positions, width, 1 + count) for count in (heads, key_heads, key_heads)]
    parts[2] = parts[2].flip(2)
    gradient, scale = drawn(len(sequences), positions, heads, width, seed=9), 1.3 / math.sqrt(width)
    inputs = [part.clone().requires_grad_() for part in parts]
    output = attention.attend(inputs[0], inputs[1], inputs[2], spans, scale)
    exact = [part.double().requires_grad_() for part in parts]
    expected = expected_attention(exact[0], exact[1], exact[2], spans, scale)
    assert output.shape == expected.shape
    assert torch.allclose(output.double(), expected, atol=1e-5, rtol=1e-5)
    found, wanted = (
        torch.autograd.grad(output, inputs, gradient),
        torch.autograd.grad(expected, exact, gradient.double()),
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5 * max(1.0, float(other.abs().max())), rtol=1e-5)


@needs_kernels
def test_a_row_has_the_same_bits_in_every_pack_and_with_every_number_of_threads(
    threads: Callable[[int], None],
) -> None:
    query, key, value, gradient = (heads_of(1, 8, 700, 64, seed).requires_grad_(seed < 4) for seed in range(1, 5))

    def outcome(spans: list[Span], first: int, end: int) -> list[Tensor]:
        inputs = [part[:, :, first:end] for part in (query, key, value)]
        output = attention.attend(inputs[0], inputs[1], inputs[2], spans, 0.125)
        return [output, *torch.autograd.grad(output, inputs, gradient[:, :, first:end].transpose(1, 2))]

    pack = spans_of([[250, 301, 149]])
    threads(1)
    assert attention.plan_workspace(query, key, [int(n) for span in pack for n in span], True)[0] == 1
    alone, packed = outcome([(0, 0, 301, True)], 250, 551), outcome(pack, 0, 700)
    threads(3)
    assert attention.plan_workspace(query, key, [int(n) for span in pack for n in span], True)[0] == 3
    by_three = outcome(pack, 0, 700)
    assert all(map(torch.equal, packed, by_three))
    assert torch.equal(packed[0][:, 250:551], alone[0])
    assert all(torch.equal(one[:, :, 250:551], other) for one, other in zip(packed[1:], alone[1:], strict=True))


@needs_kernels
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_attention_does_not_hide_invalid_numbers(number: float) -> None:
    """A position that sees the number has no valid output; other rows keep theirs."""
    query, key, value = (heads_of(1, 2, 60, 16, seed) for seed in (1, 2, 3))
    key[0, 0, 10] = number
    query[0, 0] = query[0, 0].abs()  # so that the scores are not -inf
    output = attention.attend(query, key, value, [(0, 0, 30, True), (0, 30, 60, True)], 0.25)
    assert output[0, 10:30, 0].isnan().all()
    assert output[0, 30:].isfinite().all()
    assert output[0, :, 1].isfinite().all()


@needs_kernels
def test_attention_of_large_scores_does_not_overflow() -> None:
    query, key, value = (heads_of(1, 2, 20, 16, seed) * 100 for seed in (1, 2, 3))
    output = attention.attend(query, key, value, [(0, 0, 20, True)], 1.0)
    expected = expected_attention(query.double(), key.double(), value.double(), [(0, 0, 20, True)], 1.0)
    assert torch.allclose(output.double(), expected, atol=1e-2)


def test_other_heads_are_left_to_torch() -> None:
    query = heads_of(1, 4, 8, 32, 1)
    has_kernels = library.load_kernels().is_available
    for key, is_suitable in (
        (heads_of(1, 2, 8, 32, 2), has_kernels),
        (heads_of(1, 3, 8, 32, 2), False),  # 4 is not a multiple of 3
        (heads_of(1, 4, 9, 32, 2), False),  # more keys than queries
        (heads_of(1, 4, 8, 32, 2).bfloat16(), False),
    ):
        assert attention.is_suitable(query, key, key, 1) is is_suitable
    narrow = heads_of(1, 4, 8, 24, 1)
    assert not attention.is_suitable(narrow, narrow, narrow, 1)


@needs_kernels
def test_few_rows_on_many_threads_are_left_to_torch(threads: Callable[[int], None]) -> None:
    query, key = heads_of(1, 4, 8, 32, 1), heads_of(1, 2, 8, 32, 2)
    for count, rows, is_suitable in ((4, 1, True), (5, 1, False), (5, 2, True)):
        threads(count)
        assert attention.is_suitable(query, key, key, rows) is is_suitable


@needs_kernels
def test_rows_that_do_not_cover_all_positions_are_refused() -> None:
    heads = heads_of(1, 2, 8, 32, 1)
    with pytest.raises(ValueError, match="rows have 7 positions; expected all of 1 x 8"):
        attention.attend(heads, heads, heads, [(0, 1, 8, True)], 1.0)


def test_all_kernels_are_right_with_the_instructions_of_older_cpus(tmp_path: Path) -> None:
    """The same tests in a process without AVX-512, if this CPU has it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not library.load_kernels().is_available:
        pytest.skip("this CPU has no AVX-512, or there are no kernels")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "formula or rotations or bits",
    ]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "14 passed" in done.stdout


# Other operators.


@needs_kernels
def test_gated_units_are_those_of_the_formula() -> None:
    gate, up, gradient = drawn(3, 70, 48, seed=1) * 5, drawn(3, 70, 48, seed=2), drawn(3, 70, 48, seed=3)
    gate[0, 0, :8] = torch.tensor([0.0, 100.0, -100.0, 300.0, -300.0, -1e38, math.inf, math.nan])
    inputs, exact = (
        [part.to(dtype).requires_grad_() for part in (gate, up)] for dtype in (torch.float32, torch.float64)
    )
    output, expected = _GatedUnit.apply(*inputs), functional.silu(exact[0]) * exact[1]
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    found, wanted = (
        torch.autograd.grad(output, inputs, gradient),
        torch.autograd.grad(expected, exact, gradient.double()),
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_kernels
def test_norms_are_those_of_the_formula() -> None:
    x, weight, gradient = drawn(5, 9, 80, seed=1) * 3, drawn(80, seed=2), drawn(5, 9, 80, seed=3)
    x[0, 0] = 0
    x[0, 1, 0] = math.nan
    ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    output, expected = (
        _RootMeanSquareNorm.apply(ours, weight, 1e-5),
        functional.rms_norm(exact, (80,), weight.double(), 1e-5),
    )
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    (found,), (wanted,) = (
        torch.autograd.grad(output, ours, gradient),
        torch.autograd.grad(expected, exact, gradient.double()),
    )
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-3, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("angles", [1, 3])
def test_rotations_are_those_of_transformers(angles: int) -> None:
    query, key = heads_of(3, 4, 11, 64, 1), heads_of(3, 2, 11, 64, 2)
    cos, sin = drawn(angles, 11, 64, seed=3), drawn(angles, 11, 64, seed=4)
    gradients = [heads_of(3, 4, 11, 64, 5), heads_of(3, 2, 11, 64, 6)]
    outcomes = []
    for rotates in (modeling_llama.apply_rotary_pos_emb, lambda *parts: operators.rotate(refuse, *parts)):
        inputs = [part.clone().requires_grad_() for part in (query, key)]
        outputs = rotates(*inputs, cos, sin)
        outcomes.append([*outputs, *torch.autograd.grad(outputs, inputs, gradients)])
    for one, other in zip(*outcomes, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-5)


def refuse(*_: object) -> tuple[Tensor, Tensor]:
    raise AssertionError("transformers' function was called")


@pytest.mark.parametrize(
    ("shape", "dtype", "dimension"),
    [((2, 5, 32), torch.bfloat16, 1), ((2, 5, 16), torch.float32, 1), ((2, 5, 32), torch.float32, 2)],
)
def test_other_rotations_are_left_to_transformers(
    shape: tuple[int, int, int], dtype: torch.dtype, dimension: int
) -> None:
    sequences, positions, width = shape
    heads = (sequences, 4, positions, width) if dimension == 1 else (sequences, positions, 4, width)
    query, key = drawn(*heads, seed=1).to(dtype), drawn(*heads, seed=2).to(dtype)
    cos, sin = drawn(*shape, seed=3).to(dtype), drawn(*shape, seed=4).to(dtype)
    original = modeling_llama.apply_rotary_pos_emb
    found = operators.rotate(original, query, key, cos, sin, dimension)
    assert all(map(torch.equal, found, original(query, key, cos, sin, dimension)))


@needs_kernels
def test_elementwise_results_do_not_depend_on_the_number_of_threads(threads: Callable[[int], None]) -> None:
    gate, up, weight = drawn(1000, 512, seed=1), drawn(1000, 512, seed=2), drawn(512, seed=3)
    heads, angles = heads_of(1, 8, 1000, 64, 4), drawn(1, 1000, 64, seed=5)
    found = []
    for count in (1, 3):
        threads(count)
        found.append(
            [
                torch.ops.ratchet.gated_unit(gate, up),
                *torch.ops.ratchet.gated_unit_backward(up, gate, up),
                *(norm := torch.ops.ratchet.norm(gate, weight, 1e-5)),
                torch.ops.ratchet.norm_backward(up, gate, weight, norm[1]),
                torch.ops.ratchet.rotate(heads, angles, angles, False),
            ]
        )
    assert all(map(torch.equal, *found))


@needs_kernels
@pytest.mark.parametrize("rank", [1, 16, 24])
def test_products_are_added(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_is_added_faster", lambda: True)
    output, left, right = drawn(301, 48, seed=1), drawn(301, rank, seed=2), drawn(48, rank, seed=3).t()
    called = count_calls(monkeypatch)
    expected = torch.addmm(output.double(), left.double(), right.double(), alpha=0.5)
    assert operators.add_product(output, left, right, 0.5) is output
    assert called["ratchet_add_product"] == 1
    assert torch.allclose(output.double(), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"of \[301, .*\] cannot be added to \[300, 48\]"):
        operators.add_product(output[:300], left, right)
    assert called["ratchet_add_product"] == 1


@needs_kernels
def test_wrong_shapes_are_refused_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    called = count_calls(monkeypatch)
    with pytest.raises(RuntimeError, match="must match the size"):
        _GatedUnit.apply(drawn(4, 64, seed=1), drawn(3, 64, seed=2))
    with pytest.raises(RuntimeError, match="must match the size"):
        _RootMeanSquareNorm.apply(drawn(2, 3, 64, seed=3), drawn(32, seed=4), 1e-5)
    assert not called


def test_the_memory_of_attention_includes_its_work_space() -> None:
    """A pack without contents may keep all threads busy."""
    if not library.load_kernels().is_available:
        pytest.skip(library.load_kernels().text)
    heads = torch.empty(1, 2, 2048, 64, device="meta")
    spans = [0, 0, 2048, 1]
    threads, floats = attention.plan_workspace(heads, heads, spans, is_backward=True)
    assert threads == torch.get_num_threads()
    saved = [heads, heads, heads, heads.transpose(1, 2), torch.empty(1, 2, 2048, device="meta")]
    for operator, arguments, is_backward in (
        (torch.ops.ratchet.attention.default, (heads, heads, heads, spans, 1.0), False),
        (torch.ops.ratchet.attention_backward.default, (saved[3], saved, spans, 1.0), True),
    ):
        count, floats = attention.plan_workspace(heads, heads, spans, is_backward)
        assert workspace_bytes(operator, arguments, {}, "cpu") == 4 * count * floats > 2 * 4 * 2048 * 64


def test_operations_of_attention_are_counted_as_those_of_torch() -> None:
    if not library.load_kernels().is_available:
        pytest.skip(library.load_kernels().text)
    query, key, value = (heads_of(1, 4, 60, 32, seed).requires_grad_() for seed in (1, 2, 3))
    counts = []
    for is_own in (True, False):
        with FlopCounterMode(display=False, custom_mapping=_flop_formulas()) as counter:
            if is_own:
                output = attention.attend(query, key, value, [(0, 0, 60, True)], 1.0)
            else:
                output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            output.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 7 * 2 * 4 * 60 * 60 * 32


# Without kernels.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ratchet" / "kernels"


def load_again() -> library.KernelLibrary:
    return library.load_kernels.__wrapped__()


@needs_kernels
def test_the_library_is_compiled_once_and_again_if_it_is_damaged(cache: Path) -> None:
    assert load_again().is_available
    (compiled,) = cache.iterdir()
    first = compiled.stat().st_ino
    assert load_again().is_available
    assert compiled.stat().st_ino == first
    content = compiled.read_bytes()
    compiled.write_bytes(content[:1000])
    code = "from ratchet.models.cpu_kernels import library; print(library.load_kernels().text)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == library.load_kernels().text
    assert compiled.read_bytes() == content
    assert list(cache.iterdir()) == [compiled]


@needs_kernels
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(cache: Path) -> None:
    code = "from ratchet.models.cpu_kernels import library; print(library.load_kernels().text)"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate()[0].strip() for process in started} == {library.load_kernels().text}
    assert len(list(cache.iterdir())) == 1


def test_the_variable_switches_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_CPU_KERNELS", "0")
    assert load_again() == library.KernelLibrary(None, "RATCHET_CPU_KERNELS is 0")


def test_without_a_compiler_torch_computes(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    capability = torch.backends.cpu.get_cpu_capability()
    other_cpu = f"they need AVX2 or AVX-512; this CPU has {capability}"
    assert load_again().text in ("the compiler g++ is not installed", other_cpu)
    monkeypatch.setenv("PATH", path)
    if load_again().is_available:  # the compiled library needs no compiler
        monkeypatch.setenv("PATH", str(tmp_path))
        assert load_again().text == capability


@needs_kernels
def test_a_compiler_that_fails_is_named_with_its_message(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\necho "cc1plus: unknown option" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    assert load_again() == library.KernelLibrary(None, "g++ failed: cc1plus: unknown option")
    assert list(cache.iterdir()) == []


@needs_kernels
def test_no_library_is_loaded_from_a_folder_that_others_may_write(cache: Path) -> None:
    assert load_again().is_available
    cache.chmod(0o777)
    found = load_again()
    assert not found.is_available
    assert found.text == f"{cache}: other users may write there, so no library is loaded from it"


@needs_kernels
def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.parent.parent.joinpath("ratchet").write_text("a file")
    found = load_again()
    assert not found.is_available
    assert str(cache.parent) in found.text


@needs_kernels
def test_scores_computed_with_kernels_are_distinguished(request: pytest.FixtureRequest) -> None:
    """In 16 bits no kernel computes."""

    def describe(dtype: str) -> dict[str, Any]:
        settings = Settings.model_validate({"train": {"compute_dtype": dtype}})
        return comparability.describe_numerics("adapter", settings, torch.device("cpu"), 4)

    full, half = describe("float32"), describe("bfloat16")
    assert full["kernels"] == library.load_kernels().text
    assert "kernels" not in half
    request.getfixturevalue("without_kernels")
    assert describe("float32") == {name: value for name, value in full.items() if name != "kernels"}


# Models.

LENGTHS = (20, 17, 9, 1, 5, 2, 30)


def step(model: Model, packs: list[list[int]]) -> tuple[float, list[Tensor]]:
    """Return the loss of a training step and the gradients of the adapter."""
    draw = np.random.default_rng(0)
    ids = [draw.integers(3, families.VOCABULARY, length).tolist() for length in LENGTHS]
    rows = TokenRows.from_lists(ids, [[IGNORE_INDEX] * (len(row) // 3) + row[len(row) // 3 :] for row in ids])
    model.zero_grad()
    loss = compute_loss(model, SequenceBatch.from_sequences(rows, packs, torch.device("cpu")), 1.0)
    loss.backward()
    found = [parameter.grad for _, parameter in adapters.trainable_parameters(model) if parameter.grad is not None]
    return loss.item(), [gradient.clone() for gradient in found]


@needs_kernels
@pytest.mark.parametrize("packs", [[[3, 1, 2], [6], [0, 5, 4]], [[0], [6], [2]]], ids=["packs", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi", "gpt-neox", "cohere", "mixtral"])
def test_a_step_is_the_same_up_to_rounding_with_and_without_kernels(
    family: str, packs: list[list[int]], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    shape: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "attn_implementation": "sdpa"}
    if family not in {"phi", "gpt-neox"}:
        shape |= {"num_key_value_heads": 2}
    if family in {"qwen3", "gemma3"}:
        shape["head_dim"] = 32
    if family == "gemma3":  # a layer with a window has a mask, so it is left to torch
        shape |= {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    settings = Train.model_validate({"rank": 4, "target_modules": "all", "quantization": "none", "dropout": 0.0})
    model = adapters.attach(families.make(family, **shape), settings, "digest").train()
    torch.manual_seed(5)
    for _, parameter in adapters.trainable_parameters(model):
        parameter.data.normal_(0, 0.1)
    called = count_calls(monkeypatch)
    loss, gradients = step(model, packs)
    assert called["ratchet_attention"] > 0
    assert (called["ratchet_rotate"] > 0) == (family not in {"gpt-neox", "phi", "cohere"})
    assert (called["ratchet_norm"] > 0) == (family in {"llama", "qwen3", "mixtral"})
    called.clear()
    request.getfixturevalue("without_kernels")
    expected, expected_gradients = step(model, packs)
    assert not called
    assert loss == pytest.approx(expected, rel=1e-5)
    assert len(gradients) == len(expected_gradients) > 5
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5 * largest, rtol=1e-3)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of each kernel."""
    called: Counter[str] = Counter()
    kernels = library.get_kernels()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            called[name] += 1
            return getattr(kernels, name)

    monkeypatch.setattr(library, "get_kernels", Counting)
    return called
