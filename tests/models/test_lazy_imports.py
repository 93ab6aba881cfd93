"""Tests that libraries with deferred parts behave like fully imported ones."""

from pathlib import Path

import pyarrow as pa

from libraries_cases import LIGHT, told


def test_a_worker_trains_without_pandas() -> None:
    shown = "import ratchet.training.worker, sys; print({'pandas', 'datasets'} & set(sys.modules))"
    assert told(LIGHT, shown) == "set()"


def test_other_parts_of_scipy_are_available_during_deferral() -> None:
    found = told(
        "from ratchet.models import lazy_imports as libraries",
        "with libraries.defer_linear_sum_assignment():",
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
