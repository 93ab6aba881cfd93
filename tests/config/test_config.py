"""Settings: everything wrong is refused with its place and a way out; everything right survives being written down."""

import math
import random
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from ratchet.config import params_file
from ratchet.config.data import ColumnSettings, Prepare, SourceSettings, SplitSettings
from ratchet.config.evaluation import JudgeSettings
from ratchet.config.export import AdditionalAdapterSettings, OnnxSettings
from ratchet.config.gate import RULES, AtLeastRule, ExportParityRule, HookSettings, MustImproveRule, MustNotRegressRule
from ratchet.config.schema import Base, Section, Settings
from ratchet.config.selection import RewardSettings, Select
from ratchet.config.sweep import DIRECTIONS, Sweep
from ratchet.config.train import DistillSettings, Train
from ratchet.errors import EXIT_INPUT, SettingsError


def refusal(text: str) -> str:
    """The message with which this params.yaml is refused."""
    with pytest.raises(SettingsError) as caught:
        params_file.parse(text)
    assert caught.value.exit_code == EXIT_INPUT
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- refused, and how


@pytest.mark.parametrize(
    ("text", "line", "key", "near"),
    [
        ("train:\n  rank: 8\n  lerning_rate: 1e-3\n", 3, "train.lerning_rate", "learning_rate"),
        ("trian:\n  rank: 8\n", 1, "trian", "train"),
        ("train:\n  early_stopping:\n    patiense: 3\n", 3, "train.early_stopping.patiense", "patience"),
        ("base:\n  tiny: {layer: 3}\n", 2, "base.tiny.layer", "layers"),
        ("prepare:\n  columns:\n    promt: q\n", 3, "prepare.columns.promt", "prompt"),
        ("machine:\n\n\n  retires: 1\n", 4, "machine.retires", "retries"),
        ("gate:\n  rules:\n    - {rule: must_improve, metric: x, bye: 1}\n", 3, "gate.rules.0.bye", "by"),
        (
            "gate:\n  rules:\n    - {rule: at_least, metric: x, value: 1}\n"
            "    - rule: must_not_regress\n      metric: x\n      margn: 1\n      margin: 1\n",
            6,
            "gate.rules.1.margn",
            "margin",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(
    text: str, line: int, key: str, near: str
) -> None:
    assert refusal(text) == f"params.yaml:{line}: unknown key {key}: did you mean {near}?"


@pytest.mark.parametrize(
    "text",
    [
        "machine:\n  studies: postgresql://me@h/x?password=gehe1m\n", "base:\n  source: hf_gehe1mgehe1mgehe1m\n",
        "machine:\n  tracking: https://host/?token=gehe1mgehe1m\n", "machine:\n  mirror: sftp://me:gehe1m@host/x\n",
        "machine:\n  preemption_notice: http://me:gehe1m@host/x\n", "machine:\n  metrics_file: https://me:gehe1m@host\n",
        "prepare:\n  sources: ['https://me:gehe1m@host/x.csv']\n", "prepare:\n  sources: [{files: 'ftp://me:gehe1m@h/x'}]\n",
        "promote:\n  hooks: [{webhook: 'https://host/x?token=gehe1m', retry: 1}]\n", "machine:\n  mirror: s3://b/?key=gehe1m\n",
    ],
    ids=range(10),
)  # fmt: skip
def test_a_secret_in_a_setting_is_refused_and_not_repeated(text: str) -> None:
    assert "gehe1m" not in refusal(text)


def test_an_address_to_post_to_may_hold_one() -> None:
    text = "promote:\n  hooks: [{webhook: 'https://host/x?token=gehe1m'}]\n"
    assert params_file.parse(text).promote.hooks[0].webhook == "https://host/x?token=gehe1m"


def test_an_unknown_key_that_resembles_none_gets_the_list_of_known_ones() -> None:
    assert refusal("promote:\n  zzzzzz: 1\n") == (
        "params.yaml:2: unknown key promote.zzzzzz: known keys: model_name, signing, hooks"
    )


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("1: 2\n", "params.yaml:1: unknown key 1: "),
        ("train:\n  1: 2\n", "params.yaml:2: unknown key train.1: "),
        ("train:\n  rank: 8\n  1: 2\n", "params.yaml:3: unknown key train.1: "),
        ("train: {rank: 8, true: 2}\n", "params.yaml:1: unknown key train.True: "),
        ("null: 1\n", "params.yaml:1: unknown key None: "),
    ],
)
def test_a_key_that_is_no_text_is_refused_as_unknown(text: str, begin: str) -> None:
    assert refusal(text).startswith(begin)


@pytest.mark.parametrize(
    ("value", "found"),
    [("0", "0"), ("-1", "-1"), ("fast", "'fast'"), ("", "nothing"), ("true", "True"), ("[1e-3]", "[0.001]"),
     (".nan", "nan"), (".inf", "inf"), ("nan", "nan"), ("1e999", "inf"), ("0.001s", "'0.001s'"), ("2024-01-01", "2024"),
     ("{a: 1}", "{'a': 1}")],
)  # fmt: skip
def test_a_learning_rate_that_is_none_is_refused_with_what_was_found(value: str, found: str) -> None:
    message = refusal(f"# settings\ntrain:\n  learning_rate: {value}\n")
    assert message.startswith("params.yaml:3: train.learning_rate: found ")
    assert found in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  rank: 0\n", "train.rank: found 0"),
        ("train:\n  rank: 1.5\n", "train.rank: found 1.5"),
        ("train:\n  rank: true\n", "train.rank: found True"),
        ("train:\n  double_quantization: 1\n", "train.double_quantization: found 1"),
        ("train:\n  double_quantization: 'yes'\n", "train.double_quantization: found 'yes'"),
        ("train:\n  dropout: 1.0\n", "train.dropout: found 1.0"),
        ("train:\n  schedule: cosin\n", "'cosine', 'linear' or 'constant'"),
        ("train:\n  epochs: 0\n", "train.epochs: found 0"),
        ("train:\n  seed: -1\n", "train.seed: found -1"),
        ("train: 3\n", "train: found 3"),
        ("train:\n", "train: found nothing"),
        ("prepare:\n  sources: []\n", "prepare.sources: found []"),
        ("prepare:\n  sources: [1]\n", "prepare.sources.0: found 1"),
        ("prepare:\n  columns: {prompt: ''}\n", "prepare.columns.prompt: found ''"),
        ("prepare:\n  split: {validation: 0.5, test: 0.5}\n", "nothing is left to train on"),
        ("prepare:\n  split: {validation: -1}\n", "prepare.split.validation: found -1"),
        ("prepare:\n  columns: {prompt: a}\n", "response is missing"),
        ("prepare:\n  columns: {messages: a, prompt: b, response: c}\n", "not both"),
        (
            "prepare:\n  sources: [{wieght: 2, files: x}]\n",
            "unknown key prepare.sources.0.wieght: did you mean w",
        ),
        ("prepare:\n  sources: [{weight: 1e12, files: x}]\n", "prepare.sources.0.weight: found"),
        ("prepare:\n  columns: {prompt: a, response: a}\n", "name two different columns"),
        ("prepare:\n  sources: [{files: x, columns: {promt: a}}]\n", "did you mean prompt"),
        ("prepare:\n  sources: [{weight: 2, files: x, split: test}]\n", "weight is for training rows"),
        ("prepare:\n  sources: [{weight: 2}]\n", "name either files or dataset"),
        ("prepare:\n  sources: [{dataset: a/b}]\n", "revision is missing"),
        ("prepare:\n  limits: {malformed: 2}\n", "prepare.limits.malformed: found 2"),
        ("base:\n  tiny: {heads: 5}\n", "5 does not divide hidden_size 256"),
        ("gate:\n  rules: []\n", "gate.rules: found []"),
        ("gate:\n  rules:\n    - {rule: must_improv, metric: x}\n", "unknown rule 'must_improv'"),
        ("gate:\n  rules:\n    - {metric: x}\n", "gate.rules.0"),
        ("gate:\n  rules:\n    - {rule: must_improve}\n", "gate.rules.0.metric is missing"),
        ("gate:\n  rules:\n    - {rule: must_not_regress, metric: x}\n", "gate.rules.0.margin is missing"),
        ("gate:\n  rules:\n    - {rule: must_not_regress, metric: x, margin: 0}\n", "gate.rules.0.margin: found 0"),
        ("gate:\n  confidence: 0.5\n", "gate.confidence: found 0.5"),
        ("promote:\n  model_name: a/b\n", "promote.model_name: found 'a/b'"),
        ("export:\n  also: [{path: x}]\n", "unknown key export.also.0.path: known keys: adapter, weight"),
        ("export:\n  gguf: {types: [q9]}\n", "export.gguf.types.0: found 'q9'"),
        ("export:\n  gguf: {types: [q8_0, q8_0]}\n", "q8_0 is named twice"),
        ("export:\n  shard_size: 4 parsecs\n", "export.shard_size: found '4 parsecs'"),
        ("generate:\n  labels: abc\n", "generate.labels: found 'abc': a list is wanted; write ['abc']"),
        ("evaluate:\n  measures: 3\n", "evaluate.measures: found 3: a list is wanted; write [3]"),
    ],
)
def test_a_wrong_value_is_refused_with_file_line_and_key(text: str, says: str) -> None:
    message = refusal(text)
    assert message.startswith(f"params.yaml:{text.rstrip().count(chr(10)) + 1}: ")
    assert says in message


def test_all_problems_are_in_one_message() -> None:
    message = refusal("train:\n  rank: 0\n  lerning_rate: 1\nmachine:\n  retries: -1\n")
    assert [line.split(": ")[0] for line in message.splitlines()] == ["params.yaml:2", "params.yaml:3", "params.yaml:5"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  rank: 16\n  rank: 8\n", 'params.yaml:3: not valid YAML: found duplicate key "rank"'),
        ("train:\n  rank: 1\ntrain:\n  rank: 2\n", 'params.yaml:3: not valid YAML: found duplicate key "train"'),
        ("train: {rank: 8\n", "not valid YAML"),
        ("train:\n\trank: 1\n", "params.yaml:2: not valid YAML"),
        ("train:\n  rank: 1\n---\ntrain:\n  rank: 2\n", "not valid YAML"),
        ("a\x07b: 1\n", "not valid YAML"),
        ("train: *nowhere\n", "params.yaml:1: not valid YAML"),
        ("", "found nothing"),
        ("# only a comment\n", "found nothing"),
        ("- train\n", "expected sections"),
        ("train\n", "found 'train'"),
        ("3\n", "found 3"),
    ],
)
def test_a_file_that_is_no_mapping_of_sections_is_refused(text: str, says: str) -> None:
    assert says in refusal(text)


def test_a_tag_that_would_build_a_python_object_is_not_obeyed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    assert "train.rank" in refusal(f"train:\n  rank: !!python/object/apply:pathlib.Path.touch ['{target}']\n")
    assert not target.exists()


def numeric_knobs(section: type[Section], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Key paths of all knobs that take a float."""
    found = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += numeric_knobs(field.annotation, (*prefix, name))
        elif field.annotation is float:
            found.append((*prefix, name))
    return found


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "'nan'", "'inf'"])
def test_no_knob_takes_a_number_that_is_not_finite(number: str) -> None:
    knobs = numeric_knobs(Settings)
    assert ("train", "learning_rate") in knobs
    taken = []
    for path in knobs:
        text = "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(path)).rstrip("\n") + f" {number}\n"
        try:
            params_file.parse(text)
        except SettingsError:
            continue
        taken.append(".".join(path))
    assert taken == []


@pytest.mark.parametrize(
    "rule",
    ["rule: must_improve, metric: m, by: {}", "rule: must_not_regress, metric: m, margin: {}",
     "rule: at_least, metric: m, value: {}", "rule: export_parity, max_logit_difference: {}, min_greedy_agreement: 1",
     "rule: export_parity, max_logit_difference: 1, min_greedy_agreement: {}"],
)  # fmt: skip
@pytest.mark.parametrize("number", [".nan", ".inf", "lots"])
def test_no_rule_takes_a_number_that_is_not_finite(rule: str, number: str) -> None:
    assert "gate.rules.0" in refusal(f"gate:\n  rules:\n    - {{{rule.format(number)}}}\n")


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"params\.yaml: cannot be read \(No such file"):
        params_file.load(tmp_path / "params.yaml")


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"params\.yaml: not UTF-8 \(byte 4\)"):
        params_file.load(path)


def test_settings_cannot_be_changed_after_they_were_checked() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.train.rank = 3  # type: ignore[misc]
    assert settings.train.rank == Settings().train.rank


# --------------------------------------------------------------------------------------- given on the command line


WHOLE = "machine:\n  nodes: 4\n  rendezvous: one:1\n"


@pytest.mark.parametrize("file", [WHOLE, "train:\n  rank: 4\n", "machine:\n  nodes: 4\n"])
def test_options_of_the_command_line_replace_settings_of_the_file(file: str) -> None:
    machine = params_file.parse(file, machine={"nodes": "2:3", "rendezvous": "two:29400"}).machine
    assert (machine.nodes, machine.rendezvous) == ("2:3", "two:29400")


def test_what_it_leaves_out_is_as_in_the_file() -> None:
    text = "machine:\n  nodes: 4\n  rendezvous: one:29400\n"
    assert params_file.parse(text, machine={"nodes": None, "rendezvous": None}) == params_file.parse(text)
    assert params_file.parse(text, machine={"nodes": "2", "rendezvous": None}).machine.rendezvous == "one:29400"


@pytest.mark.parametrize(
    ("given", "option", "says"),
    [
        ({"nodes": "0"}, "nodes", "found '0': '0' is no number of machines"),
        ({"nodes": "3:2"}, "nodes", "found '3:2': '3:2' is no number of machines"),
        ({"nodes": "a"}, "nodes", "found 'a': 'a' is no number of machines; write one such as 4, or the fewest and"),
        ({"nodes": "2", "rendezvous": "somewhere"}, "rendezvous", "found 'somewhere': 'somewhere' is no place to meet"),
        ({"nodes": "2", "rendezvous": "one:0"}, "rendezvous", "found 'one:0'"),
        ({"nodes": "2", "rendezvous": "one:70000"}, "rendezvous", "found 'one:70000'"),
    ],
)
@pytest.mark.parametrize("file", ["train:\n  rank: 4\n", "machine:\n  retries: 1\n"])
def test_a_wrong_option_is_refused_by_its_name_in_the_words_of_the_file(
    given: dict[str, str], option: str, says: str, file: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        params_file.parse(file, machine=given)
    assert str(caught.value).startswith(f"--{option}: {says}")
    assert f"machine.{option}: {says}" in refusal(yaml.safe_dump({"machine": given}))


@pytest.mark.parametrize("file", ["train:\n  rank: 4\n", "machine:\n  retries: 1\n"])
def test_several_machines_without_a_place_to_meet_are_refused_with_both_ways_to_give_one(file: str) -> None:
    with pytest.raises(SettingsError, match=r"set machine\.rendezvous \(or --rendezvous\) to HOST:PORT"):
        params_file.parse(file, machine={"nodes": "2"})


# ----------------------------------------------------------------------------------------------------- accepted


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1e-4", 0.0001), ("1E-4", 0.0001), ("0.0001", 0.0001), ("1.0e-4", 0.0001), ("'1e-4'", 0.0001),
        ('"1e-4"', 0.0001), ("'0.0001'", 0.0001), ("1e-04", 0.0001), ("'1.0E-4'", 0.0001), ("+1e-4", 0.0001),
        # `dvc exp run -S` writes 0.00001 as the first of these.
        ("1e-05", 0.00001), ("'1e-05'", 0.00001), ("0.00001", 0.00001),
    ],
)  # fmt: skip
def test_a_small_number_is_read_however_it_is_spelled(text: str, rate: float) -> None:
    found = params_file.parse(f"train:\n  learning_rate: {text}\n").train.learning_rate
    assert (found, type(found)) == (rate, float)


def test_a_quoted_count_is_read() -> None:
    assert params_file.parse("train:\n  rank: '8'\n").train.rank == 8


def test_what_is_left_out_has_its_default() -> None:
    assert params_file.parse("train:\n  rank: 8\n") == Settings.model_validate({"train": {"rank": 8}})


@pytest.mark.parametrize("prefix", ["\ufeff", "%YAML 1.2\n---\n", "---\n", "\r\n"])
def test_editors_habits_do_not_matter(prefix: str) -> None:
    assert params_file.parse(prefix + "train:\r\n  rank: 8\r\n").train.rank == 8


def test_each_rule_becomes_its_class() -> None:
    rules = params_file.parse(
        "gate:\n  rules:\n"
        "    - {rule: must_improve, metric: accuracy, over: champion, by: 1e-2}\n"
        "    - {rule: must_not_regress, metric: answer_loss, margin: 0.02}\n"
        "    - {rule: at_least, metric: accuracy, value: 1}\n"
        "    - {rule: export_parity, max_logit_difference: 1e-3, min_greedy_agreement: 1}\n"
    ).gate.rules
    assert rules == (
        MustImproveRule(rule="must_improve", metric="accuracy", over="champion", by=0.01),
        MustNotRegressRule(rule="must_not_regress", metric="answer_loss", against="champion", margin=0.02),
        AtLeastRule(rule="at_least", metric="accuracy", value=1.0),
        ExportParityRule(rule="export_parity", max_logit_difference=0.001, min_greedy_agreement=1.0),
    )


# -------------------------------------------------------------------------------------------- written and read again

AWKWARD_TEXTS = (
    "prompt", "Customer message", "a: b", "# no comment", "it's", 'say "hi"', "back\\slash", "{braces}", "[x]",
    "- item", "null", "~", "true", "No", "on", "1e-4", "007", "1_000", "0x1f", "0o17", "0b11", "2024-01-01",
    "2024-01-01 10:00:00", "12:30", ".5", "nan", ".inf", "=", "<<", "*star", "&and", "!bang", "%percent", "@at",
    "`tick", " leading", "trailing ", "a,b", "über/größe", "日本語", "emoji 🙂", "tab\there", "two\nlines",
    "nbsp\u00a0", "line\u2028separator", "-", "?",
)  # fmt: skip


def test_any_text_survives_being_written_for_both_kinds_of_reader() -> None:
    sources = [*AWKWARD_TEXTS, {"files": "x", "columns": {"prompt": "a: b", "response": "# no comment"}}]
    columns = {"prompt": "null", "response": "{braces}", "system": "two\nlines"}
    for given in ({"sources": AWKWARD_TEXTS}, {"sources": sources, "columns": columns}):
        settings = Settings.model_validate({"prepare": given})
        written = params_file.dump(settings)
        assert params_file.parse(written) == settings
        assert Settings.model_validate(yaml.safe_load(written)) == settings
        assert yaml.safe_load(written)["prepare"]["sources"][: len(AWKWARD_TEXTS)] == list(AWKWARD_TEXTS)


FLOATS = (1e-05, 1e-7, 1.5e-7, 0.1, 1 / 3, 3.0, 100.0, 123456.0, 1234567.0, 1e6, 1e15, 1e16, 1e22, 0.30000000000000004,
          2.0000000001, 1234567890.5, 5e-324, 1.7976931348623157e308)  # fmt: skip


def test_any_number_survives_being_written_for_both_kinds_of_reader() -> None:
    settings = Settings.model_validate({"sweep": {"space": {"train.alpha": {"choices": FLOATS}}}})
    written = params_file.dump(settings)
    assert params_file.parse(written).sweep.space["train.alpha"].choices == FLOATS
    found = yaml.safe_load(written)["sweep"]["space"]["train.alpha"]["choices"]
    assert found == list(FLOATS)
    assert all(isinstance(number, int | float) for number in found)
    settings = Settings.model_validate({"train": {"alpha": 1e-05}})
    assert params_file.parse(params_file.dump(settings)).train.alpha == 1e-05


def test_every_default_survives_being_written_with_its_sentence() -> None:
    def knobs(section: type[Section]) -> list[tuple[str, str]]:
        found, sentences = [], section.sentences()
        for name, field in section.model_fields.items():
            inner = field.annotation
            below = knobs(inner) if isinstance(inner, type) and issubclass(inner, Section) else []
            found += below if section is Settings else [(name, sentences.get(name, "")), *below]
        return found

    text = params_file.dump(Settings())
    assert params_file.parse(text) == Settings()
    for name, sentence in knobs(Settings):
        assert sentence.endswith("."), f"{name} has no sentence"
        assert f"# {' '.join(sentence.split())}\n" in text
        assert f"{name}:" in text


def bounds(metadata: tuple[Any, ...]) -> tuple[float, float]:
    """Open ends of the range that the constraints of a number allow, as far as random draws need them."""
    low, high = -1e6, 1e7
    parts = [part for constraint in metadata for part in getattr(constraint, "metadata", [constraint])]
    for part in parts:
        low = max([low, *(getattr(part, name) for name in ("ge", "gt") if getattr(part, name, None) is not None)])
        high = min([high, *(getattr(part, name) for name in ("le", "lt") if getattr(part, name, None) is not None)])
    return low, high


def draw(rng: random.Random, annotation: Any, metadata: tuple[Any, ...] = ()) -> Any:  # noqa: PLR0911
    """A random value that this annotation allows, as a document would hold it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return draw(rng, inner, (*metadata, *more))
    if origin is Literal:
        return rng.choice(get_args(annotation))
    if origin in (Union, types.UnionType):
        return draw(rng, rng.choice(get_args(annotation)), metadata)
    if origin is tuple:
        return [draw(rng, get_args(annotation)[0]) for _ in range(rng.randint(1, 3))]
    if origin is dict:
        return {
            f"{'layers.' * rng.randint(0, 1)}{name}": draw(rng, get_args(annotation)[1]) for name in ("q_proj", "up")
        }
    if annotation is type(None):
        return None
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is str:
        if any(getattr(part, "pattern", None) for c in metadata for part in getattr(c, "metadata", [c])):
            return rng.choice(["model", "m", "007", "true", "a-b_c.d", "1e5", "2024-01-01"])
        return rng.choice(["q_proj", "data/raw/a b.csv", *AWKWARD_TEXTS])
    low, high = bounds(metadata)
    if annotation is int:
        return rng.randint(int(low), int(max(low, min(high, 10 ** rng.randint(1, 7)))))
    assert annotation is float, annotation
    share = rng.choice([rng.random(), 10 ** rng.uniform(-9, -0.01), round(rng.uniform(0.01, 0.99), 2)])
    return low + (high - low) * share if math.isfinite(high) else 0.0


def several(rng: random.Random, kinds: Sequence[type[Section]], least: int, most: int) -> list[dict[str, Any]]:
    return [random_section(rng, rng.choice(kinds)) for _ in range(rng.randint(least, most))]


SPECIAL: dict[str, Callable[[random.Random], Any]] = {
    "checkpoint_every": lambda rng: rng.choice(["auto", 1, 250, "30 s", "10 min", "1.5 h"]),
    "evaluation_rows": lambda rng: rng.choice(["auto", 1, 64]),
    "labels": lambda rng: rng.choice([[], ["ham", "no spam"], ["null", "1.5", "\U0001f642"]]),
    "length_bins": lambda rng: sorted(rng.sample(range(1, 5000), 3)),
    "answer_format": lambda rng: rng.choice([None, "json", r"\d+: [a-z]*", "^(yes|no)$"]),
    "sources": lambda rng: several(rng, [SourceSettings], 1, 3),
    "rules": lambda rng: several(rng, RULES, 1, 4),
    "hooks": lambda rng: several(rng, [HookSettings], 0, 2),
    "also": lambda rng: several(rng, [AdditionalAdapterSettings], 0, 2),
    "types": lambda rng: rng.choice([[], ["q8_0"], ["f16", "q4_k_m"]]),
    "shard_size": lambda rng: rng.choice([1, 4_000_000_000]),
    "space": lambda rng: {key: random_knob(rng) for key in rng.sample(KNOBS, rng.randint(1, len(KNOBS)))},
    "objectives": lambda rng: [{"metric": one} for one in rng.sample(sorted(DIRECTIONS), rng.randint(1, 3))],
    "studies": lambda rng: rng.choice([None, "postgresql://me@host:5432/studies?sslmode=require"]),
    "tracking": lambda rng: rng.choice([None, "https://mlflow.example:5000/team"]),
    "gpus": lambda rng: rng.choice(["auto", 1, 4]),
    "nodes": lambda rng: rng.choice(["1", "8", "2:8"]),
    "rendezvous": lambda rng: rng.choice(["node-1.example:29400", "10.0.0.7:29400"]),
    "mirror": lambda rng: rng.choice([None, "s3://bucket/a folder", "/mnt/shared", "sftp://me@host/runs"]),
    "mirror_bytes_s": lambda rng: rng.choice([None, 1, 20_000_000]),
    "log_bytes": lambda rng: rng.choice([4096, 10_000_000]),
    "metrics_port": lambda rng: rng.choice([None, 1, 9464, 65535]),
    "metrics_file": lambda rng: rng.choice([None, "/var/lib/a folder/ratchet.prom"]),
    "address": lambda rng: rng.choice(["http://127.0.0.1:8000/v1", "https://judge.example"]),
    "reasoning_marks": lambda rng: rng.choice([["<think>", "</think>"], ["[THINK]", "[/THINK]"]]),
    "max_kl": lambda rng: rng.choice([{}, {"q8_0": 0.5}, {"int8": 1e-3, "f16": 2}]),
}
"""Fields whose values no annotation describes, or that hold a list of sections."""


KNOBS = ["train.rank", "train.alpha", "train.adalora.target_rank", "train.targets", "über.größe"]


def random_knob(rng: random.Random) -> dict[str, Any]:
    low = rng.choice([1, 0.5, 1e-5, 3.25e-7])
    kinds: list[dict[str, Any]] = [
        {"low": low, "high": low * rng.randint(1, 9), "log": True},
        {"low": -low, "high": low, "step": low / 4},
        {"choices": [None, True, 3, 1e-5, "all", "yes", "1e-4", ["q_proj", "v_proj"]]},
        {"tie": rng.choice(["2 * train.rank", "rank", "train.rank / 2"])},
    ]
    when = rng.choice([{}, {"train.adapter": "lora"}, {"train.adapter": ["lora", "dora"], "train.double": True}])
    return rng.choice(kinds) | ({"when": when} if when else {})


def random_section(rng: random.Random, section: type[Section]) -> dict[str, Any]:  # noqa: PLR0912, PLR0915 (a case a class)
    found = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        kinds_of = [one for one in (inner, *get_args(inner)) if isinstance(one, type) and issubclass(one, Section)]
        if name in SPECIAL:
            found[name] = SPECIAL[name](rng)
        elif kinds_of:
            found[name] = random_section(rng, kinds_of[0])
        else:
            found[name] = draw(rng, inner, tuple(field.metadata))
    if "window_rows" in found and found["temperature"] == 0:
        found["samples"] = 1
    if "heads" in found:
        found["hidden_size"] = found["heads"] * rng.randint(1, 8)
    if {"validation", "test"} <= found.keys():
        found["validation"], found["test"] = found["validation"] / 2, found["test"] / 2
    # Of what excludes each other, one is kept.
    exclusive = {
        SplitSettings: [["group"], ["stratify"], ["time"]],
        SourceSettings: [["files"], ["dataset", "revision"]],
        ColumnSettings: [["prompt", "response", "system"], ["messages"]],
    }.get(section, [[]])
    kept = rng.choice(exclusive)
    found |= {name: None for names in exclusive for name in names if name not in kept}
    found |= {name: found[name] or f"a {name}" for name in kept if found[name] is None and section is not SplitSettings}
    if section is ColumnSettings and found["prompt"] is not None and found["prompt"] == found["response"]:
        found["response"] += " too"
    if section is Train:  # adapters go with what they go with; each way must survive
        ways = [
            {"adapter": "lora", "initialization": "pissa", "quantization": "none"},
            {"adapter": "lora", "initialization": "zero"},
            {"adapter": "dora", "initialization": "zero"},
        ]
        found |= rng.choice(ways) | {"adapter_dtype": rng.choice(["float32", "bfloat16"])}
    if section is DistillSettings and found["top_k"] is None:
        found["asked"] = "during"
    if section is JudgeSettings:
        found["against"] = rng.choice([["base"], ["champion", "base"], ["anchor", "champion"]])
    if section is OnnxSettings:
        found["types"] = rng.choice([[], ["fp32", "int8"]])
    if section is Settings and rng.random() < 0.5:
        found["evaluate"]["forms"] = ["merged"]
    elif section is Settings:  # scores of the adapter say nothing about another update
        found["export"] |= {"weight": 1, "also": [], "modules": []}
    if section is Sweep:
        found["name"] = rng.choice(["sweep", "on", "1e4", "A_b-3"])
    if section is Sweep and len(found["objectives"]) > 1:  # nothing orders trials by several figures
        found["pruner"]["kind"] = "none"
        found["sampler"]["kind"] = rng.choice(["tpe", "gp", "random", "grid"])
    if section is HookSettings:
        found |= rng.choice([{"webhook": None}, {"webhook": "https://example.org/hook", "command": []}])
    if section is Base:
        found["trust_remote_code"] = rng.choice([None, found["source"]])
    if section is SourceSettings and found["split"] in ("validation", "test"):
        found["weight"] = 1
    if section is Prepare and any(one["weight"] != 1 for one in found["sources"]):  # both say how often rows come
        found["balance"]["by"] = None
    if section is RewardSettings and not found["command"]:
        found |= {"minimum": None, "choose": False}
    if section is Select:
        found |= {"format": rng.choice([None, "json", "labels", r"\d+"]), "final": rng.choice([None, r"= (\d+)$"])}
        found |= {"finishes": rng.choice([["stop"], ["length", "context"]])}
        found |= {"max_characters": rng.choice([None, 10**9])}
    return found


@pytest.mark.parametrize("text", ["0", "-3", "soon", "0 min", "10 parsecs", "1.5", "10min", "[1]", "null"])
def test_an_interval_that_is_none_is_refused_with_one_message(text: str) -> None:
    with pytest.raises(SettingsError, match=r"machine\.checkpoint_every: found .* a number of steps") as raised:
        params_file.parse(f"machine:\n  checkpoint_every: {text}\n")
    assert len(str(raised.value).splitlines()) == 1


def test_a_list_of_sources_may_be_given_as_its_only_entry() -> None:
    one = params_file.parse("prepare:\n  sources: data/raw/x.csv\n  leakage: {files: data/raw/y.csv}\n")
    many = params_file.parse("prepare:\n  sources: [data/raw/x.csv]\n  leakage: {files: [data/raw/y.csv]}\n")
    assert one == many


@pytest.mark.parametrize("seed", range(15))
def test_random_settings_survive_being_written_for_both_kinds_of_reader(seed: int) -> None:
    settings = Settings.model_validate(random_section(random.Random(seed), Settings))
    written = params_file.dump(settings)
    assert params_file.parse(written) == settings
    assert Settings.model_validate(yaml.safe_load(written)) == settings


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("train: {initialization: pissa}", "16 or 32 bits only"),
        ("train: {initialization: pissa, quantization: none, adapter: dora}", "one of plain LoRA"),
        ("train: {adapter: adalora, rank: 8}", r"must be below rank \(8\)"),
        ("train: {adapter: adalora, adalora: {begin: 0.5, end: 0.6}}", "no steps to cut ranks in"),
        ("train: {adapter: adalora, rank_stabilized: true}", "finds ranks itself"),
        ("train: {adapter: adalora, rate_ratio: 4}", "two matrices of LoRA"),
        ("train: {adapter: adalora, guards: {on_spike: roll_back}}", "ranks that adalora has cut"),
        ("train: {alpha: 0}", "alpha"),
        ("train: {rank: 0}", "rank"),
        ("base: {source: owner/model, revision: main, trust_remote_code: other/model}", "is not base.source"),
        ("sweep: {space: {train.rank: {low: 8, high: 4}}}", r"low: 8 is above high \(4\)"),
        ("sweep: {space: {train.dropout: {low: 0, high: 0.5, log: true}}}", "low: 0 has no logarithm"),
        ("sweep: {space: {train.rank: {low: 8}}}", "give both low and high"),
        ("sweep: {space: {train.rank: {low: 8, high: 16, choices: [8]}}}", "either low and high, or choices, or a tie"),
        ("sweep: {space: {train.rank: {}}}", "either low and high, or choices, or a tie"),
        ("sweep: {space: {train.rank: {low: 1, high: 9, log: true, step: 2}}}", "a logarithmic range has none"),
        ("sweep: {space: {train.rank: {choices: [8, 8]}}}", "the same value twice"),
        ("sweep: {objectives: [{metric: perplexity}]}", "no evaluation reports 'perplexity'; there are: "),
        ("sweep: {objectives: [{metric: accuracy}, {metric: accuracy}]}", "the same metric twice"),
        ("sweep: {objectives: [{metric: accuracy}, {metric: memory_bytes}]}", "orders trials by one figure"),
        ("sweep: {name: a/b}", "sweep.name"),
        ("machine: {studies: 'postgresql://me:hidden@host/db'}", "holds a password"),
        ("machine: {tracking: 'https://me:hidden@host'}", "holds a user or a password.*MLFLOW_TRACKING_PASSWORD"),
        ("machine: {tracking: 'postgresql://host/mlflow'}", "is no address of an MLflow server; write http"),
        ("machine: {ray: {gpus: -1}}", "-1 is no number of GPUs; write one, or auto"),
        ("machine: {mirror: 's3://key:hidden@bucket/x'}", "holds a password or a query"),
        ("machine: {mirror: 'https://host/x?sig=hidden'}", "holds a password or a query"),
        ("machine: {mirror: bucket/folder}", "is no place; write a URL such as s3://"),
        ("machine: {mirror: 'memory://x'}", "machine.mirror.*memory: is no place for a mirror: other machines"),
        ("machine: {mirror: 'https://host/x'}", "https: is no place for a mirror"),
        ("machine: {mirror: s3://b, mirror_bytes_s: 20 snails}", "is no number of bytes; write 20MB"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(section: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        params_file.parse(section + "\n")


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("train:\n  adapter: adalora\n  rank: 8\n", "params.yaml:1: train.adalora.target_rank: 8 must be below"),
        ("prepare:\n  sources: [{files: a, dataset: b}]\n", "params.yaml:2: prepare.sources.0: name either files or"),
    ],
)
def test_what_does_not_go_together_is_named_by_its_keys_and_not_as_a_dictionary(text: str, begin: str) -> None:
    assert refusal(text).startswith(begin)
    assert "{" not in refusal(text)


def test_settings_of_two_sections_that_do_not_go_together_are_refused() -> None:
    message = refusal("export:\n  weight: 0.5\n")
    assert message.startswith("params.yaml: export merges another update")
    assert "evaluate.forms: [merged]" in message
