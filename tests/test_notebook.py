"""The quickstart notebook: stored without outputs, and its code uses names that exist. A proof executes it."""

import ast
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

import ratchet

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}


def test_its_code_is_valid_and_uses_public_names() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    transform = TransformerManager().transform_cell
    used = {
        node.attr
        for cell in notebook.cells if cell.cell_type == "code"
        for node in ast.walk(ast.parse(transform(cell.source)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ratchet"
    }  # fmt: skip
    assert used <= set(ratchet.__all__)
    assert {"init", "base", "prepare", "train", "compare", "export", "evaluate", "gate", "chat"} <= used


def test_only_one_cell_installs_and_only_on_colab() -> None:
    sources = [cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    [cell] = [source for source in sources if "%pip" in source]
    before, _, after = cell.partition('if "google.colab" in sys.modules:\n')
    assert "%pip" not in before
    assert after.startswith("    %pip install")
