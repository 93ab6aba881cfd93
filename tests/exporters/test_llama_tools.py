"""Tests the calls of llama.cpp's own tools, replaced by scripts that record their arguments."""

import json
import os
import sys
from pathlib import Path

import pytest

from ratchet.config.export import Export, GgufSettings, GgufType
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError
from ratchet.exporters import inputs
from ratchet.exporters.gguf import llama_cpp_tools
from ratchet.exporters.gguf.llama_cpp_tools import LlamaCppTools

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
Path({note!r}).write_text(json.dumps([sys.argv[1:], sorted(os.environ)]))
{body}
"""
QUANTIZES = "Path(sys.argv[2]).write_bytes(Path(sys.argv[1]).read_bytes() + sys.argv[3].encode())"
CONVERTS = "Path(sys.argv[-1]).write_bytes(b'GGUF' + Path(sys.argv[1], 'config.json').read_bytes())"


def fake(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(FAKE.format(python=sys.executable, note=str(path.parent / "called.json"), body=body))
    path.chmod(0o755)
    return path


def called(tool: Path) -> tuple[list[str], list[str]]:
    arguments, environment = json.loads((tool.parent / "called.json").read_text())
    return arguments, environment


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "f32.gguf").write_bytes(b"GGUF whole")
    return tmp_path / "f32.gguf"


def left(folder: Path) -> set[str]:
    """Return the files that could be mistaken for results."""
    return {path.name for path in folder.iterdir() if path.is_file()} - {"f32.gguf"}


def test_quantize_gets_the_arguments_of_llama_cpp(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    tool = fake(tmp_path / "tools" / "llama-quantize", QUANTIZES)
    target = tmp_path / "model-q4_k_m.gguf"
    target.write_bytes(b"older")
    llama_cpp_tools.quantize_gguf(LlamaCppTools(tool, None), source, target, "q4_k_m", 3)
    assert target.read_bytes() == b"GGUF wholeQ4_K_M"
    arguments, environment = called(tool)
    assert arguments[0] == str(source)
    assert arguments[2:] == ["Q4_K_M", "3"]
    assert arguments[1] != str(target)  # the name appears only when the file is complete
    assert "HF_TOKEN" not in environment
    assert left(tmp_path) == {"model-q4_k_m.gguf"}


def test_convert_is_run_offline_by_this_python(tmp_path: Path) -> None:
    tool = fake(tmp_path / "checkout" / "convert_hf_to_gguf.py", CONVERTS)
    tool.chmod(0o644)  # Python runs the script, so it needs no execute permission
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    llama_cpp_tools.convert_to_gguf(LlamaCppTools(None, tool), tmp_path / "hf", tmp_path / "model.gguf", "bf16")
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF{}"
    arguments, environment = called(tool)
    assert arguments[:-1] == [str(tmp_path / "hf"), "--outtype", "bf16", "--outfile"]
    assert {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} <= set(environment)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print('loading'); print('error: tensor too wide'); sys.exit(4)", r"\(exit code 4\): error: tensor too wide$"),
        ("sys.exit(1)", r"\(exit code 1\): no output$"),
        (
            "Path(sys.argv[2]).write_bytes(b'GGUF half'); os.kill(os.getpid(), 9)",
            r"\(killed by SIGKILL\): no output$",
        ),
        ("print('done', file=sys.stderr)", r"\(exit code 0, but no GGUF file\): done$"),
        ("Path(sys.argv[2]).write_bytes(b'')", r"\(exit code 0, but no GGUF file\)"),
    ],
    ids=["fails", "fails silently", "is killed half way", "writes nothing", "writes nonsense"],
)
def test_a_tool_that_fails_leaves_nothing_and_is_quoted(source: Path, tmp_path: Path, body: str, said: str) -> None:
    tool = fake(tmp_path / "tools" / "llama-quantize", body)
    with pytest.raises(SettingsError, match=said) as raised:
        llama_cpp_tools.quantize_gguf(LlamaCppTools(tool, None), source, tmp_path / "model.gguf", "q4_k_m", 1)
    assert str(tool) in str(raised.value)
    assert left(tmp_path) == set()


def test_a_tool_that_is_not_executable(source: Path, tmp_path: Path) -> None:
    tool = tmp_path / "llama-quantize"
    tool.write_bytes(b"\x7fELF nonsense")
    tool.chmod(0o755)
    with pytest.raises(SettingsError, match="cannot be started"):
        llama_cpp_tools.quantize_gguf(LlamaCppTools(tool, None), source, tmp_path / "model.gguf", "q4_k_m", 1)


@pytest.mark.parametrize("place", ["", "bin", "build/bin"], ids=["beside", "bin", "build"])
def test_both_tools_are_found_in_llama_cpps_directories(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    root = tmp_path / "llama.cpp"
    quantize = fake(root / place / "llama-quantize", QUANTIZES)
    convert = fake(root / "convert_hf_to_gguf.py", CONVERTS)
    assert llama_cpp_tools.find_tools(root) == LlamaCppTools(quantize, convert)


def test_quantize_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = fake(tmp_path / "programs" / "llama-quantize", QUANTIZES)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{tool.parent}")
    assert llama_cpp_tools.find_tools(None) == LlamaCppTools(tool, None)
    convert = fake(tmp_path / "checkout" / "convert_hf_to_gguf.py", CONVERTS)
    assert llama_cpp_tools.find_tools(tmp_path / "checkout") == LlamaCppTools(tool, convert)


def test_a_converter_in_build_bin_makes_an_unknown_architecture_exportable(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    fake(tmp_path / "llama.cpp" / "build" / "bin" / "convert_hf_to_gguf.py", CONVERTS)
    settings = Settings(export=Export(gguf=GgufSettings(types=("f16",))), machine=Machine(llama_cpp="llama.cpp"))
    assert inputs.require_exportable(model, settings, tmp_path).convert is not None
    with pytest.raises(SettingsError, match=r"set machine\.llama_cpp to a checkout of llama\.cpp"):
        inputs.require_exportable(model, settings.model_copy(update={"machine": Machine()}), tmp_path)


def test_a_directory_without_tools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert llama_cpp_tools.find_tools(None) == LlamaCppTools(None, None)
    with pytest.raises(SettingsError, match=r"machine\.llama_cpp: .*directory not found"):
        llama_cpp_tools.find_tools(tmp_path / "none")
    fake(tmp_path / "llama-quantize", QUANTIZES).chmod(0o644)  # not executable
    with pytest.raises(
        SettingsError, match=r"machine\.llama_cpp: found neither llama-quantize nor convert_hf_to_gguf\.py"
    ):
        llama_cpp_tools.find_tools(tmp_path)


def test_types_that_need_the_tool_are_refused_early(tmp_path: Path) -> None:
    llama_cpp_tools.require_quantizer(LlamaCppTools(None, None), ["f32", "q8_0", "q4_0"], True)
    llama_cpp_tools.require_quantizer(LlamaCppTools(tmp_path, None), ["q8_0", "q4_k_m"], True)
    with pytest.raises(SettingsError, match="q6_k needs"):
        llama_cpp_tools.require_quantizer(LlamaCppTools(None, None), ["q8_0", "q6_k", "q4_k_m"], True)
    # llama.cpp's converter writes other types than our writer.
    llama_cpp_tools.require_quantizer(LlamaCppTools(None, tmp_path), ["f32", "q8_0"], False)
    with pytest.raises(SettingsError, match=r"q4_0 needs .* a type that needs no tool \(bf16, f16, f32, q8_0, "):
        llama_cpp_tools.require_quantizer(LlamaCppTools(None, tmp_path), ["q8_0", "q4_0"], False)


@pytest.mark.parametrize("kind", ["q4_k_m", "q4_0"])
def test_without_tools_the_message_says_how_to_get_them(source: Path, tmp_path: Path, kind: GgufType) -> None:
    with pytest.raises(SettingsError, match=rf"{kind} needs llama\.cpp's llama-quantize.*machine\.llama_cpp"):
        llama_cpp_tools.quantize_gguf(LlamaCppTools(None, None), source, tmp_path / "m.gguf", kind, 1)
    with pytest.raises(SettingsError, match=r"convert_hf_to_gguf\.py.*machine\.llama_cpp"):
        llama_cpp_tools.convert_to_gguf(LlamaCppTools(None, None), tmp_path, tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m"])
def test_the_converter_writes_some_types_only(tmp_path: Path, kind: GgufType) -> None:
    tool = fake(tmp_path / "convert_hf_to_gguf.py", CONVERTS)
    with pytest.raises(SettingsError, match=f"found {kind}; .* writes only"):
        llama_cpp_tools.convert_to_gguf(LlamaCppTools(None, tool), tmp_path, tmp_path / "m.gguf", kind)
