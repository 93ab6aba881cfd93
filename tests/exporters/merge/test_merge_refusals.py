"""Tests refusals before any weight of the base is read, their messages, and a full disk."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import small_bases as small
from ratchet.errors import BaseModelError, DamagedFileError, InputError
from ratchet.exporters.merge import merger
from ratchet.models import adapter_format, weights
from ratchet.models.base_model import BASE_DIGEST
from ratchet.storage import files

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
X_A = Q_A.replace("q_proj", "x_proj")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    base = small.write_base(folder / "base", "llama")
    return base, small.write_adapter(folder / "adapter", base, small.settings(quantization="nf4"))


@pytest.fixture
def place(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Copy a base and an adapter, which the test may damage."""
    for path in made:
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / "base", tmp_path / "adapter"


@pytest.fixture
def refused(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that plans a recipe and returns the message of its refusal.

    Reading a weight of the base fails the test.
    """

    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    def refuse(kind: type[InputError], **changes: Any) -> str:
        monkeypatch.setattr(weights.WeightReader, "__init__", read)
        given = {"train": small.settings(quantization="nf4")} | changes
        with pytest.raises(kind) as caught:
            merger.plan_merge(small.recipe(*place, **given))
        assert caught.value.exit_code == 2
        return str(caught.value)

    return refuse


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt", BASE_DIGEST: "base"})


def shorten(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_valid_inputs_are_accepted(place: tuple[Path, Path]) -> None:
    merger.plan_merge(small.recipe(*place, train=small.settings(quantization="nf4")))


def test_an_adapter_of_another_base(refused: Any) -> None:
    message = refused(BaseModelError, card=small.card(digest="0123456789abcdef"))
    assert "the adapter was trained on base model base, but the merge uses 0123456789ab" in message


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "shards missing, first {file}"),
        (lambda shard: edit(shard, lambda tensors: tensors.pop(min(tensors))), "{tensor} is in none of the files"),
        (lambda shard: shorten(shard, 8), "{file}: damaged or truncated"),
    ],
    ids=["missing", "without a tensor", "cut short"],
)
def test_a_damaged_shard_of_the_base(
    damage: Callable[[Path], Any], said: str, place: tuple[Path, Path], refused: Any
) -> None:
    shard = sorted(place[0].glob("model-*.safetensors"))[1]
    tensor = min(load_file(shard))
    damage(shard)
    assert said.format(file=shard.name, tensor=tensor) in refused(BaseModelError)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (
            lambda tensors: tensors.update({X_A: torch.ones(4, 64)}),
            BaseModelError,
            f"the adapter does not fit this base model: the model has no parameter {X_A}",
        ),
        (
            lambda tensors: tensors.pop(Q_A),
            BaseModelError,
            f"requires {Q_A}, but adapter_model.safetensors lacks it",
        ),
        (
            lambda tensors: tensors.update({Q_A: torch.ones(4, 32)}),
            BaseModelError,
            f"{Q_A}: found 4 x 32; expected 4 x 64",
        ),
        (
            lambda tensors: tensors[Q_A][1, 2:3].fill_(torch.nan),
            DamagedFileError,
            f"{Q_A} contains NaN or infinity",
        ),
        (
            lambda tensors: tensors[Q_A][1, 2:3].fill_(torch.inf),
            DamagedFileError,
            f"{Q_A} contains NaN or infinity",
        ),
    ],
    ids=["without a place", "missing", "shape", "NaN", "infinity"],
)
def test_an_adapter_tensor_that_does_not_fit(
    change: Callable[[Any], Any], kind: type[InputError], said: str, place: tuple[Path, Path], refused: Any
) -> None:
    edit(place[1] / adapter_format.WEIGHTS, change)
    assert said in refused(kind)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type: found LOHA; only LORA can be merged"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4 changed the base"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: such an adapter is not a change of weights"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication: such an adapter is not a change of weights"),
    ],
    ids=["kind", "initialisation", "alora", "replication"],
)
def test_adapters_that_are_not_a_change_of_weights(
    changes: dict[str, Any], said: str, place: tuple[Path, Path], refused: Any
) -> None:
    small.edit_config(place[1], **changes)
    assert said in refused(BaseModelError)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_settings_of_an_adapter_that_cannot_be_read(content: str, place: tuple[Path, Path], refused: Any) -> None:
    (place[1] / adapter_format.CONFIG).write_text(content)
    assert "adapter_config.json: cannot be read" in refused(DamagedFileError)


def test_a_truncated_adapter_file(place: tuple[Path, Path], refused: Any) -> None:
    shorten(place[1] / adapter_format.WEIGHTS, 1)
    assert "adapter_model.safetensors: cannot be read" in refused(DamagedFileError)


def test_a_disk_that_becomes_full(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's error is raised; the caller removes the scratch folder."""
    written: list[Path] = []

    def full(operation: str, path: Path) -> None:
        if operation == "write":
            written.append(path)
            if len(written) > 30:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "before", full)
    wanted = small.recipe(*place, train=small.settings(quantization="nf4"))
    with pytest.raises(OSError, match="No space left"):
        merger.merge_model(wanted, place[0].parent / "merged", lambda *_: None)
    assert not (place[0].parent / "merged" / "config.json").exists()
