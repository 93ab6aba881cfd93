"""Tests of products of matrices by oneDNN. The kernels of a process are replaced once, so each case has its own
process."""

from pathlib import Path

import pytest
import torch

from libraries_cases import told
from ratchet.config.settings import Settings
from ratchet.evaluation import comparability
from ratchet.models import cpu_products

FORCED = (
    "import torch, warnings",
    "warnings.simplefilter('error')",
    "from ratchet.models import cpu_products",
    "cpu_products.is_onednn_faster = lambda: True",
    "kinds = torch.float32, torch.float64, torch.bfloat16, torch.int64",
    "def draw(kind, *shape): return torch.randint(-3, 4, shape, generator=source).to(kind)",
    "source = torch.Generator().manual_seed(0)",
)
PAIRS = (
    "def pairs(kind):",
    "    for m, k, n in ((300, 64, 128), (1, 4096, 512), (2000, 16, 512), (0, 5, 7), (5, 0, 7), (3, 4, 5)):",
    "        yield draw(kind, m, k), draw(kind, k, n)",
    "        yield draw(kind, k, m).t(), draw(kind, n, k).t()",
    "        yield draw(kind, 2 * m, k)[::2], draw(kind, k, 2 * n)[:, ::2]",
    "inputs = [pair for kind in kinds for pair in pairs(kind)]",
)


def test_products_of_whole_numbers_are_the_same_with_any_kernel() -> None:
    found = told(
        *FORCED,
        *PAIRS,
        "def compute():",
        "    for left, right in inputs:",
        "        bias = torch.ones(right.shape[1], dtype=left.dtype)",
        "        product = torch.mm(left, right)",
        "        yield product",
        "        yield torch.mm(left, right, out=torch.empty_like(product))",
        "        yield torch.addmm(bias, left, right)",
        "        yield torch.addmm(product, left, right, beta=2, alpha=3)",
        "before = list(compute())",
        "cpu_products.use_onednn()",
        "cpu_products.use_onednn()",
        "after = list(compute())",
        "print(len(after), all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, after, strict=True)))",
    )
    assert found == "288 True"


def test_gradients_of_a_layer_are_the_same_and_wrong_shapes_are_explained() -> None:
    found = told(
        *FORCED,
        "layer, x = torch.nn.Linear(64, 128), draw(torch.float32, 2, 300, 64).requires_grad_()",
        "layer.weight.data, layer.bias.data = draw(torch.float32, 128, 64), draw(torch.float32, 128)",
        "def compute():",
        "    y = layer(x)",
        "    return [y, *torch.autograd.grad(y.sum(), [x, layer.weight, layer.bias])]",
        "before = compute()",
        "cpu_products.use_onednn()",
        "print(all(map(torch.equal, before, compute())))",
        "try: torch.mm(torch.ones(300, 64), torch.ones(65, 300))",
        "except RuntimeError as error: print(error)",
    )
    assert found.splitlines() == ["True", "mat1 and mat2 shapes cannot be multiplied (300x64 and 65x300)"]


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_only_cpus_of_amd_with_avx512_use_onednn(
    vendor: str | None, capability: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if vendor is not None:
        info.write_text(f"vendor_id\t: {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(cpu_products, "CPU_INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu_products.is_onednn_faster() is expected


def test_scores_computed_with_other_products_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(is_faster: bool, device: str) -> dict[str, object]:
        monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: is_faster)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
        return comparability.describe_numerics("adapter", Settings(), torch.device(device), 4)

    default = describe(False, "cpu")
    assert "products" not in default
    assert describe(True, "cpu") == default | {"products": "oneDNN"}
    assert describe(True, "cuda:0") == describe(False, "cuda:0")


def test_loading_a_model_replaces_the_products_of_any_process(tmp_path: Path) -> None:
    shape = "vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1"
    found = told(
        *FORCED,
        "from pathlib import Path",
        "from transformers import LlamaConfig, LlamaForCausalLM",
        f"folder = Path({str(tmp_path / 'model')!r})",
        f"LlamaForCausalLM(LlamaConfig({shape})).save_pretrained(folder)",
        "from ratchet.models import loading",
        "calls, multiply = [], cpu_products._multiply",
        "def count_call(left, right):",
        "    calls.append(left.shape)",
        "    return multiply(left, right)",
        "cpu_products._multiply = count_call",
        "def multiply_ones(): return torch.mm(torch.ones(300, 64), torch.ones(64, 300))",
        "multiply_ones()",
        "before = len(calls)",
        "loading.load_plain(folder, torch.float32, torch.device('cpu'))",
        "calls.clear()",
        "multiply_ones()",
        "print(before, len(calls))",
    )
    assert found == "0 1"
