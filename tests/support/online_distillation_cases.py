"""Cases for a teacher in memory: its probabilities, their independence from the student, refusals, and cost."""

from pathlib import Path
from typing import Any

import torch
import transformers

from ratchet.config.train import DistillSettings, Train
from ratchet.data.batches import TokenRows
from ratchet.models import model_spec
from ratchet.models.teacher import TeacherCandidate
from ratchet.training.distillation import OnlineTeacherReader
from small_loop import SHAPE, SMALL

CPU = torch.device("cpu")
TEACHER = SHAPE | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}


def distill_settings(top_k: int | None = 6, **changes: Any) -> Train:
    chosen = {"teacher": "t", "mode": "online", "weight": 0.6, "temperature": 2.0, "top_k": top_k} | changes
    return SMALL.model_copy(update={"distill": DistillSettings(**chosen), "dropout": 0.0})


def found(folder: Path, wide: int = 64, spoil: Any = None) -> TeacherCandidate:
    """Create a random model that is larger than the student. The first 64 rows of its embedding are tokens."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(**TEACHER | {"vocab_size": wide}, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config)
    if spoil is not None:
        with torch.no_grad():
            spoil(model)
    model.save_pretrained(folder)
    return TeacherCandidate(folder, model_spec.load(folder), 64, wide)


def attending(folder: Path, settings: Train, rows: TokenRows, **more: Any) -> OnlineTeacherReader:
    return OnlineTeacherReader(found(folder, **more), settings, rows, CPU)
