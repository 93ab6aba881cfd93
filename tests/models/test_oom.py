"""Tests detection of out-of-memory errors, release of memory, and suggested alternatives."""

import weakref
from dataclasses import replace

import pytest
import torch

import families
from memory_cases import LONG, PLAN, savings, settings
from ratchet.config.machine import Machine
from ratchet.models import model_spec, oom


def test_an_optimizer_of_eight_bits_is_advised_where_it_saves() -> None:
    wide = model_spec.from_config(families.FAMILIES["llama"](hidden_size=512))
    assert "train.optimizer: adamw_8bit" in savings(
        oom.describe_alternatives(wide, settings(), Machine(), replace(LONG, row_tokens=8))
    )


def test_alternatives_state_the_need_and_omit_settings_already_in_use() -> None:
    def advice(row_tokens: int) -> str:
        frugal = settings(rank=1, quantization="nf4", optimizer="adamw_8bit")
        work = replace(LONG, row_tokens=row_tokens)
        return oom.describe_alternatives(PLAN, frugal, Machine(activation_checkpointing=True), work)

    found = advice(512)
    assert list(savings(found)) == ["prepare.max_tokens: 256"]
    assert "activations" in found
    assert "weights" in found
    assert "After changes to `machine` this run resumes; other changes start a new run." in found
    assert "Use a smaller base model, or a machine with more memory." in advice(2)


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (OSError(28, "No space left on device"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=["cuda", "cublas", "cudnn", "driver", "cublas-other", "illegal-access", "disk", "other-type", "interrupt"],
)
def test_nothing_else_is_taken_for_it(error: BaseException, exhausted: bool) -> None:
    assert oom.is_out_of_memory(error) == exhausted


class Node:
    """Refers to itself, as the frames of a failed computation do through its error."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(4)


def test_releasing_gives_back_what_only_refers_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = weakref.ref(Node())
    oom.release_memory()
    assert kept() is None
    is_kept: list[bool] = []
    kept = weakref.ref(Node())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: is_kept.append(kept() is not None))
    oom.release_memory()
    assert is_kept == [False], "a GPU gives back only what is free"
