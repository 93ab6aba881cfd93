"""Libraries that are imported without what nobody calls: they do the same as when they are imported whole."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa

AS_IT_COMES = "import transformers.modeling_utils, bitsandbytes, peft"
LIGHT = "from ratchet.model import libraries; libraries.load()"


def told(*lines: str) -> str:
    """What a process of its own prints: importing is done once in each."""
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_is_never_called_is_not_loaded() -> None:
    shown = "import sys; print(*(n for n in ('scipy.optimize', 'torch._inductor.compile_fx') if n in sys.modules))"
    assert told(AS_IT_COMES, shown) == "scipy.optimize torch._inductor.compile_fx", "then this is needless"
    assert told(LIGHT, shown) == ""


def test_a_worker_trains_without_pandas() -> None:
    assert (
        told(LIGHT, "import ratchet.training.worker, sys; print({'pandas', 'datasets'} & set(sys.modules))") == "set()"
    )


def test_the_models_are_those_that_transformers_finds_by_itself() -> None:
    shown = [
        "import transformers.models as m, hashlib",
        "told = [sorted(m._class_to_module.items()), sorted(m._modules), sorted(m.__all__)]",
        "told.append(sorted((k, sorted(map(str, v))) for k, v in m._object_missing_backend.items()))",
        "print(len(told[0]), hashlib.sha256(repr(told).encode()).hexdigest())",
        "from transformers.models.llama import LlamaConfig",
    ]
    found = told(LIGHT, *shown)
    assert int(found.split()[0]) > 1000
    assert found == told(AS_IT_COMES, *shown)


def test_scipy_is_whole_when_it_is_asked_for() -> None:
    found = told(
        LIGHT,
        "from transformers.loss.loss_for_object_detection import linear_sum_assignment as late",
        "import numpy, sys; costs = numpy.array([[4.0, 1], [2, 8]])",
        "print('scipy.optimize' in sys.modules, *map(list, late(costs)))",
        "import scipy.optimize; print(scipy.optimize.minimize is sys.modules['scipy.optimize'].minimize)",
        "print(scipy.optimize.linear_sum_assignment.__module__)",
    )
    assert found.splitlines() == ["False [0, 1] [1, 0]", "True", "scipy.optimize._lsap"] or found.splitlines()[:2] == [
        "False [np.int64(0), np.int64(1)] [np.int64(1), np.int64(0)]",
        "True",
    ]


def test_other_parts_of_scipy_are_there_meanwhile() -> None:
    found = told(
        "from ratchet.model import libraries",
        "with libraries.assignment_put_off():",
        "    from scipy.optimize import brentq, linear_sum_assignment",
        "import scipy.optimize; print(brentq is scipy.optimize.brentq, round(brentq(lambda x: x - 2, 0, 5), 6))",
    )
    assert found == "True 2.0"


FAKE_CLOUD = {
    "__init__.py": "from boto3.session import Session\n\ndef client(name):\n    return Session().client(name)\n",
    "session.py": "class Session:\n    def client(self, name):\n        return f'client of {name}'\n",
}


def cloud(tmp_path: Path) -> str:
    """The line that makes a small boto3 importable: whether the real one is installed does not matter then."""
    folder = tmp_path / "boto3"
    folder.mkdir()
    for name, text in FAKE_CLOUD.items():
        (folder / name).write_text(text)
    (tmp_path / "boto3-1.0.dist-info").mkdir()
    (tmp_path / "boto3-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: boto3\nVersion: 1.0\n")
    return f"import sys; sys.path.insert(0, {str(tmp_path)!r})"


def test_the_cloud_s_library_is_loaded_when_it_is_used(tmp_path: Path) -> None:
    shown = "print('boto3' in sys.modules)"
    installed = cloud(tmp_path)
    assert told(installed, AS_IT_COMES, shown) == "True", "then putting it off is needless"
    found = told(
        installed,
        LIGHT,
        shown,
        "from accelerate.commands.config import sagemaker",
        "print(sagemaker.boto3.client('iam'), 'boto3' in sys.modules)",
        "import boto3; print(boto3.__spec__.loader is not None, boto3.client('s3'))",
    )
    assert found.splitlines() == ["False", "client of iam True", "True client of s3"]


def test_its_submodules_can_be_imported_meanwhile(tmp_path: Path) -> None:
    found = told(
        cloud(tmp_path),
        "from ratchet.model import libraries",
        "with libraries.cloud_put_off():",
        "    import boto3.session",
        "    from boto3.session import Session",
        "    print(Session().client('iam'), boto3.client('s3'))",
        "import boto3; print(boto3.Session is Session)",
    )
    assert found.splitlines() == ["client of iam client of s3", "True"]


def test_where_the_cloud_s_library_is_not_it_is_still_not_found(tmp_path: Path) -> None:
    hide = "import sys, importlib.util as u; u.find_spec = lambda name, package=None: None"
    found = told(
        hide,
        "from ratchet.model import libraries",
        "with libraries.cloud_put_off():",
        "    print('boto3' in sys.modules)",
    )
    assert found == "False"


def test_a_split_is_read_without_pandas(tmp_path: Path) -> None:
    column = pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int32()))
    table = pa.table({"input_ids": column, "labels": column})
    with pa.OSFile(str(tmp_path / "train.arrow"), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    found = told(
        "import pyarrow as pa, sys; from ratchet.data.batches import Rows",
        f"table = pa.ipc.open_stream(pa.memory_map({str(tmp_path / 'train.arrow')!r})).read_all()",
        "whole, part = Rows.from_arrow(table), Rows.from_arrow(table.slice(1, 2))",
        "print(whole.input_ids.tolist(), whole.offsets.tolist(), part.input_ids.tolist(), part.offsets.tolist())",
        "print({'pandas', 'pyarrow.compute'} & set(sys.modules))",
    )
    assert found.splitlines() == ["[9, 1, 2, 3] [0, 1, 3, 3, 4] [1, 2] [0, 2, 2]", "set()"]


def test_functions_are_compiled_when_they_are_called() -> None:
    found = told(
        "import torch",
        "from ratchet.model import libraries",
        "whole = torch.compile",
        "with libraries.compilation_put_off():",
        "    @torch.compile(backend='eager', dynamic=False)",
        "    def twice(x):",
        "        'Double.'",
        "        return torch.compiler.is_compiling(), 2 * x",
        "    thrice = torch.compile(lambda x: 3 * x, backend='eager')",
        "print(torch.compile is whole, twice.__doc__, twice(torch.ones(1))[1].item(), thrice(torch.ones(1)).item())",
        "print(twice(torch.ones(1))[0])",
    )
    assert found.splitlines() == ["True Double. 2.0 3.0", "True"]


def test_garbage_is_looked_for_again_afterwards() -> None:
    assert told(LIGHT, "import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000)") == "True True"
    assert told("import gc; gc.disable()", LIGHT, "print(gc.isenabled())") == "False"
