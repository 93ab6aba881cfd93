"""Proves that libraries that are imported in part for a quick start (row R22) behave like fully imported libraries."""

from libraries_cases import LIGHT, told

PACKAGES = ("models",)
AS_IT_COMES = "import transformers.modeling_utils, bitsandbytes, peft"


def test_what_is_never_called_is_not_loaded() -> None:
    names = ("scipy.optimize", "torch._inductor.compile_fx", "torch._dynamo.eval_frame")
    shown = f"import sys; print(*(name for name in {names} if name in sys.modules))"
    assert told(AS_IT_COMES, shown) == " ".join(names), "then this is needless"
    assert told(LIGHT, shown) == ""


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


def test_functions_are_compiled_when_they_are_called() -> None:
    found = told(
        "import torch",
        "from ratchet.models import lazy_imports as libraries",
        "whole = torch.compile",
        "with libraries.defer_compilation():",
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
