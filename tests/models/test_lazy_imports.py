"""Tests that libraries with deferred parts behave like fully imported ones."""

from pathlib import Path

import pyarrow as pa
import pytest

from libraries_cases import LIGHT, told


def test_a_worker_trains_without_pandas() -> None:
    shown = "import ratchet.training.worker, sys; print({'pandas', 'datasets'} & set(sys.modules))"
    assert told(LIGHT, shown) == "set()"


def test_a_worker_trains_without_the_compiler() -> None:
    found = told(
        "from ratchet.models import lazy_imports as libraries",
        "libraries.import_model_libraries(in_own_process=True)",
        "import ratchet.training.worker, sys, torch",
        "torch.set_deterministic_debug_mode('error')",
        "weight = torch.nn.Parameter(torch.ones(1))",
        "optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0)",
        "weight.grad = torch.ones(1); optimizer.step(); optimizer.zero_grad()",
        "loaded = {'sympy', 'torch._dynamo.eval_frame', 'torch.distributed.tensor'} & set(sys.modules)",
        "print(loaded, round(weight.item(), 6))",
    )
    assert found == "set() 0.5"


DEFERRED_DYNAMO = (
    "import sys, torch",
    "from ratchet.models.lazy_dynamo import defer_dynamo",
    "defer_dynamo()",
    "deferred = torch._dynamo",
    "@torch.compiler.disable",
    "def is_compiling(): return torch.compiler.is_compiling()",
    "@torch.compiler.disable(recursive=False)",
    "def also_compiling(): return torch.compiler.is_compiling()",
    "@torch.compiler.allow_in_graph",
    "def double(x): return 2 * x",
    "assert not is_compiling() and not also_compiling() and 'sympy' not in sys.modules",
)


def test_functions_decorated_before_the_compiler_is_loaded_are_treated_as_declared() -> None:
    found = told(
        *DEFERRED_DYNAMO,
        "graphs = []",
        "def keep(graph, _): graphs.append(graph); return graph.forward",
        "def compute(x): return double(x) + 1, is_compiling(), also_compiling(), torch.compiler.is_compiling()",
        "print(torch.compile(compute, backend=keep)(torch.ones(1)), deferred is torch._dynamo)",
        "print(any(node.target is double for graph in graphs for node in graph.graph.nodes))",
    )
    assert found.splitlines() == ["(tensor([3.]), False, False, True) True", "True"]


@pytest.mark.parametrize("name", ["config", "utils", "backends.debugging", "eval_frame"])
def test_a_part_of_the_compiler_is_imported_once(name: str) -> None:
    found = told(
        *DEFERRED_DYNAMO,
        f"import torch._dynamo.{name} as part",
        f"print(part is sys.modules['torch._dynamo.{name}'] is torch._dynamo.{name}, part.__spec__.name)",
    )
    assert found == f"True torch._dynamo.{name}"


def test_distributed_tensors_are_available_to_what_needs_them() -> None:
    found = told(
        "from ratchet.models import lazy_imports as libraries",
        "libraries.import_model_libraries(in_own_process=True)",
        "import torch, transformers.utils",
        "print(torch.distributed.tensor.DTensor.__name__, hasattr(torch.distributed, 'missing'))",
        "print(transformers.utils.is_torch_distributed_available())",
    )
    assert found.splitlines() == ["DTensor False", "False"]
    kept = told(LIGHT, "import transformers.utils; print(transformers.utils.is_torch_distributed_available())")
    assert kept == "True"


def test_other_parts_of_scipy_are_available_during_deferral() -> None:
    found = told(
        "from ratchet.models import lazy_imports as libraries",
        "with libraries.defer_function('scipy.optimize', 'linear_sum_assignment'):",
        "    from scipy.optimize import brentq, linear_sum_assignment",
        "import scipy.optimize; print(brentq is scipy.optimize.brentq, round(brentq(lambda x: x - 2, 0, 5), 6))",
    )
    assert found == "True 2.0"


def test_boto3_is_loaded_by_its_first_use() -> None:
    found = told(
        "import sys; from ratchet.models.lazy_imports import import_model_libraries; import_model_libraries()",
        "from accelerate.commands.config import sagemaker",
        "before = 'boto3' in sys.modules",
        "print(before, sagemaker.boto3.Session.__module__, 'boto3' in sys.modules)",
    )
    assert found == "False boto3.session True"


def test_a_split_is_read_without_pandas(tmp_path: Path) -> None:
    column = pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int32()))
    table = pa.table({"input_ids": column, "labels": column})
    with pa.OSFile(str(tmp_path / "train.arrow"), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    found = told(
        "import pyarrow as pa, sys; from ratchet.data.batches import TokenRows as Rows",
        f"table = pa.ipc.open_stream(pa.memory_map({str(tmp_path / 'train.arrow')!r})).read_all()",
        "whole, part = Rows.from_arrow(table), Rows.from_arrow(table.slice(1, 2))",
        "print(whole.input_ids.tolist(), whole.offsets.tolist(), part.input_ids.tolist(), part.offsets.tolist())",
        "print({'pandas', 'pyarrow.compute'} & set(sys.modules))",
    )
    assert found.splitlines() == ["[9, 1, 2, 3] [0, 1, 3, 3, 4] [1, 2] [0, 2, 2]", "set()"]
