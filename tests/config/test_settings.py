"""Tests settings: invalid settings are refused with line and remedy; valid ones survive a write and a read."""

import math
import random
import re
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from ratchet.config import machine, params_file
from ratchet.config.base import Base
from ratchet.config.evaluate import JudgeSettings
from ratchet.config.export import AdditionalAdapterSettings, BitsAndBytesSettings, Export, OnnxSettings
from ratchet.config.fields import Section
from ratchet.config.gate import RULES, AtLeastRule, ExportParityRule, MustImproveRule, MustNotRegressRule
from ratchet.config.prepare import (
    ColumnSettings,
    Prepare,
    QualitySettings,
    SemanticDuplicateSettings,
    SourceSettings,
    SplitSettings,
)
from ratchet.config.promote import HookSettings
from ratchet.config.select import RewardSettings, Select
from ratchet.config.settings import Settings
from ratchet.config.sweep import DIRECTIONS, Sweep
from ratchet.config.train import DistillSettings, EarlyStoppingSettings, GuardSettings, Train
from ratchet.errors import EXIT_INPUT, SettingsError


def refusal(text: str) -> str:
    """Return the message with which this params.yaml is refused."""
    with pytest.raises(SettingsError) as caught:
        params_file.parse(text)
    assert caught.value.exit_code == EXIT_INPUT
    return str(caught.value)


# ------------------------------------------------------------------------------------------ refusals and their messages


@pytest.mark.parametrize(
    ("text", "line", "key", "near"),
    [
        ("train:\n  rank: 8\n  lerning_rate: 1e-3\n", 3, "train.lerning_rate", "learning_rate"),
        ("trian:\n  rank: 8\n", 1, "trian", "train"),
        ("train:\n  early_stopping:\n    patiense: 3\n", 3, "train.early_stopping.patiense", "patience"),
        ("base:\n  tiny: {layer: 3}\n", 2, "base.tiny.layer", "layers"),
        ("prepare:\n  columns:\n    promt: q\n", 3, "prepare.columns.promt", "prompt"),
        ("machine:\n\n\n  max_restart: 1\n", 4, "machine.max_restart", "max_restarts"),
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
def test_the_message_for_an_unknown_key_has_its_line_and_the_closest_known_key(
    text: str, line: int, key: str, near: str
) -> None:
    assert refusal(text) == f"params.yaml:{line}: {key}: unknown setting; did you mean {near}?"


@pytest.mark.parametrize(
    "text",
    [
        "machine:\n  study_storage: postgresql://me@h/x?password=gehe1m\n", "base:\n  source: hf_gehe1mgehe1mgehe1m\n",
        "machine:\n  tracking_uri: https://host/?token=gehe1mgehe1m\n", "machine:\n  replica: sftp://me:gehe1m@host/x\n",
        "machine:\n  preemption_notice: http://me:gehe1m@host/x\n", "machine:\n  metrics_file: https://me:gehe1m@host\n",
        "prepare:\n  sources: ['https://me:gehe1m@host/x.csv']\n", "prepare:\n  sources: [{files: 'ftp://me:gehe1m@h/x'}]\n",
        "promote:\n  hooks: [{webhook: 'https://host/x?token=gehe1m', retry: 1}]\n", "machine:\n  replica: s3://b/?key=gehe1m\n",
    ],
    ids=range(10),
)  # fmt: skip
def test_a_secret_in_a_setting_is_refused_without_repeating_it(text: str) -> None:
    assert "gehe1m" not in refusal(text)


def test_a_webhook_url_may_contain_a_secret() -> None:
    text = "promote:\n  hooks: [{webhook: 'https://host/x?token=gehe1m'}]\n"
    assert params_file.parse(text).promote.hooks[0].webhook == "https://host/x?token=gehe1m"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("train.rank: 8\n", "train.rank: unknown setting; write rank below train, without the dot"),
        ("learning_rate: 1\n", "learning_rate: unknown setting; did you mean train.learning_rate"),
        ("min_score: 1\n", "min_score: unknown setting; did you mean select.reward.min_score"),
    ],
)
def test_a_setting_outside_its_section_is_named_with_it(text: str, hint: str) -> None:
    assert refusal(text).startswith(f"params.yaml:1: {hint}")


def test_the_message_for_a_key_unlike_any_known_one_lists_the_known_ones() -> None:
    assert refusal("promote:\n  zzzzzz: 1\n") == (
        "params.yaml:2: promote.zzzzzz: unknown setting; known: model_name, approvals, signing, hooks"
    )


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("1: 2\n", "params.yaml:1: 1: unknown setting"),
        ("train:\n  1: 2\n", "params.yaml:2: train.1: unknown setting"),
        ("train:\n  rank: 8\n  1: 2\n", "params.yaml:3: train.1: unknown setting"),
        ("train: {rank: 8, true: 2}\n", "params.yaml:1: train.True: unknown setting"),
        ("null: 1\n", "params.yaml:1: None: unknown setting"),
    ],
)
def test_a_key_that_is_not_a_string_is_unknown(text: str, begin: str) -> None:
    assert refusal(text).startswith(begin)


@pytest.mark.parametrize(
    ("value", "found"),
    [("0", "0"), ("-1", "-1"), ("fast", "'fast'"), ("", "nothing"), ("true", "True"), ("[1e-3]", "[0.001]"),
     (".nan", "nan"), (".inf", "inf"), ("nan", "nan"), ("1e999", "inf"), ("0.001s", "'0.001s'"), ("2024-01-01", "2024"),
     ("{a: 1}", "{'a': 1}")],
)  # fmt: skip
def test_an_invalid_learning_rate_is_refused_with_the_value_found(value: str, found: str) -> None:
    message = refusal(f"# settings\ntrain:\n  learning_rate: {value}\n")
    assert message.startswith("params.yaml:3: train.learning_rate: found ")
    assert found in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  rank: 0\n", "train.rank: found 0; expected an integer >= 1"),
        ("train:\n  seed: 99999999999999999999\n", "expected at most 9223372036854775807 (64 bits)"),
        ("train:\n  learning_rate: 1e99\n", "train.learning_rate: found 1e+99; expected at most 1e+30"),
        ("train:\n  rank: 1.5\n", "train.rank: found 1.5"),
        ("train:\n  rank: true\n", "train.rank: found True"),
        ("train:\n  double_quantization: 1\n", "train.double_quantization: found 1"),
        ("train:\n  double_quantization: 'yes'\n", "train.double_quantization: found 'yes'"),
        ("train:\n  dropout: 1.0\n", "train.dropout: found 1.0"),
        ("train:\n  schedule: cosin\n", "train.schedule: found 'cosin'; expected one of: cosine, linear, constant"),
        ("train:\n  epochs: 0\n", "train.epochs: found 0"),
        ("train:\n  seed: -1\n", "train.seed: found -1"),
        ("train: 3\n", "train: found 3"),
        ("train:\n", "train: found nothing"),
        ("base:\n  source: 5\n", "base.source: found 5; expected non-empty text (in quotes)"),
        ("prepare:\n  sources: []\n", "prepare.sources: found []"),
        ("prepare:\n  sources: [1]\n", "prepare.sources.0: found 1"),
        ("prepare:\n  columns: {prompt: ''}\n", "prepare.columns.prompt: found ''"),
        ("prepare:\n  split: {validation: 0.5, test: 0.5}\n", "expected less than 1, so that training rows remain"),
        ("prepare:\n  split: {validation: -1}\n", "prepare.split.validation: found -1"),
        ("prepare:\n  columns: {prompt: a}\n", "prepare.columns.response: missing; set it, or remove prompt"),
        (
            "prepare:\n  columns: {messages: a, prompt: b, response: c}\n",
            "whole conversations exclude prompt, response and system",
        ),
        (
            "prepare:\n  sources: [{wieght: 2, files: x}]\n",
            "prepare.sources.0.wieght: unknown setting; did you mean w",
        ),
        ("prepare:\n  sources: [{weight: 1e12, files: x}]\n", "prepare.sources.0.weight: found"),
        (
            "prepare:\n  columns: {prompt: a, response: a}\n",
            "prepare.columns.response: found 'a', the same column as prompt",
        ),
        ("prepare:\n  sources: [{files: x, columns: {promt: a}}]\n", "did you mean prompt"),
        (
            "prepare:\n  sources: [{weight: 2, files: x, split: test}]\n",
            "prepare.sources.0.weight: applies to training rows only",
        ),
        ("prepare:\n  sources: [{weight: 2}]\n", "prepare.sources.0: expected either files or dataset"),
        ("prepare:\n  sources: [{dataset: a/b}]\n", "prepare.sources.0.revision: missing; set a commit"),
        ("prepare:\n  limits: {malformed: 2}\n", "prepare.limits.malformed: found 2"),
        ("train:\n  rank_pattern: {'': 4}\n", "params.yaml:2: train.rank_pattern.: found ''; expected an integer >= 1"),
        ("prepare:\n  limits: {malformd: 0.1}\n", "prepare.limits.malformd: unknown; expected one of: 'malformed', "),
        ("base:\n  tiny: {heads: 5}\n", "base.tiny.heads: found 5; expected a divisor of hidden_size (256)"),
        ("gate:\n  rules: []\n", "gate.rules: found []"),
        (
            "gate:\n  rules:\n    - {rule: must_improv, metric: x}\n",
            "gate.rules.0.rule: found 'must_improv'; expected one of: must_improve,",
        ),
        ("gate:\n  rules:\n    - {metric: x}\n", "gate.rules.0"),
        ("gate:\n  rules:\n    - {rule: must_improve}\n", "gate.rules.0.metric: missing; expected a non-empty list"),
        (
            "gate:\n  rules:\n    - {rule: must_not_regress, metric: x}\n",
            "gate.rules.0.margin: missing; expected a number > 0",
        ),
        ("gate:\n  rules:\n    - {rule: must_not_regress, metric: x, margin: 0}\n", "gate.rules.0.margin: found 0"),
        ("gate:\n  confidence: 0.5\n", "gate.confidence: found 0.5"),
        ("promote:\n  model_name: a/b\n", "promote.model_name: found 'a/b'"),
        (
            "export:\n  additional_adapters: [{path: x}]\n",
            "export.additional_adapters.0.path: unknown setting; known: adapter, prepared_data, weight",
        ),
        ("export:\n  gguf: {types: [q9]}\n", "export.gguf.types.0: found 'q9'"),
        ("export:\n  gguf: {types: [q8_0, q8_0]}\n", "q8_0 is named twice"),
        ("export:\n  max_shard_size: 4 parsecs\n", "export.max_shard_size: found '4 parsecs'"),
        ("generate:\n  labels: abc\n", "generate.labels: found 'abc'; expected a list such as ['abc']"),
        ("evaluate:\n  metrics: 3\n", "evaluate.metrics: found 3; expected a list such as [3]"),
    ],
)
def test_a_wrong_value_is_refused_with_file_line_and_key(text: str, says: str) -> None:
    message = refusal(text)
    assert message.startswith(f"params.yaml:{text.rstrip().count(chr(10)) + 1}: ")
    assert says in message


def test_all_problems_are_in_one_message() -> None:
    message = refusal("train:\n  rank: 0\n  lerning_rate: 1\nmachine:\n  max_restarts: -1\n")
    assert [line.split(": ")[0] for line in message.splitlines()] == ["params.yaml:2", "params.yaml:3", "params.yaml:5"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  rank: 16\n  rank: 8\n", 'params.yaml:3: not valid YAML: found duplicate key "rank"'),
        ("train:\n  rank: 1\ntrain:\n  rank: 2\n", 'params.yaml:3: not valid YAML: found duplicate key "train"'),
        ("train: {rank: 8\n", "not valid YAML"),
        ("train:\n\trank: 1\n", "params.yaml:2: not valid YAML"),
        ("train:\n  rank: 1\n---\ntrain:\n  rank: 2\n", "not valid YAML"),
        ("train:\n  a\x07b: 1\n", "params.yaml:2: found character U+0007, which YAML does not allow"),
        ("train: *nowhere\n", "params.yaml:1: not valid YAML"),
        (
            "promote:\n  model_name: 2026-02-30\n",
            "params.yaml: a value cannot be read (ValueError: day is out",
        ),
        ("train:\n  rank: !!bool x\n", "a value cannot be read"),
        (f"train:\n  rank: {'1' * 5000}\n", "a value cannot be read"),
        (f"train: {'[' * 3000}\n", "a value cannot be read"),
        ("train: !!omap [a: 1]\n", "train.a: unknown setting"),
        ("", "found nothing"),
        ("# only a comment\n", "found nothing"),
        ("- train\n", "expected sections"),
        ("train\n", "found 'train'"),
        ("3\n", "found 3"),
    ],
)
def test_a_file_that_is_not_a_mapping_of_sections_is_refused(text: str, says: str) -> None:
    assert says in refusal(text)


def test_yaml_tags_create_no_python_objects(tmp_path: Path) -> None:
    target = tmp_path / "made"
    assert "train.rank" in refusal(f"train:\n  rank: !!python/object/apply:pathlib.Path.touch ['{target}']\n")
    assert not target.exists()


def list_numeric_settings(section: type[Section], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the key paths of all settings that take a float."""
    found = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += list_numeric_settings(field.annotation, (*prefix, name))
        elif field.annotation is float:
            found.append((*prefix, name))
    return found


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "'nan'", "'inf'"])
def test_settings_refuse_numbers_that_are_not_finite(number: str) -> None:
    knobs = list_numeric_settings(Settings)
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
def test_rules_refuse_numbers_that_are_not_finite(rule: str, number: str) -> None:
    assert "gate.rules.0" in refusal(f"gate:\n  rules:\n    - {{{rule.format(number)}}}\n")


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"params\.yaml: cannot be read \(No such file"):
        params_file.load(tmp_path / "params.yaml")


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"params\.yaml: not UTF-8 \(byte 4\)"):
        params_file.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prepare.canaries": 5, "prepare.task": "labels"}, "override prepare.canaries: found 5 with task labels;"),
        ({"select.max_characters": 10, "select.min_characters": 100}, "override select.max_characters: found 10;"),
        ({"select.reward.command": "python a.py"}, r"expected a .*list such as \['python', 'a.py'\]"),
    ],
)
def test_an_override_is_named_by_rules_about_its_section(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        params_file.parse("train:\n  rank: 4\n", overrides=changes)


def test_a_misspelt_key_of_a_list_in_a_variable_is_not_suggested_as_a_variable() -> None:
    with pytest.raises(
        SettingsError, match=r"RATCHET__PREPARE__SOURCES: 0.wieght: unknown setting; did you mean weight\?"
    ):
        params_file.parse(
            "train:\n  rank: 4\n", environment={"RATCHET__PREPARE__SOURCES": "[{files: a.jsonl, wieght: 2}]"}
        )


def test_a_number_in_quotes_is_exact() -> None:
    for text, number in (("'9007199254740993'", 2**53 + 1), ("'007'", 7)):
        assert params_file.parse(f"train:\n  seed: {text}\n").train.seed == number
    assert params_file.parse("train:\n  learning_rate: '1e-4'\n").train.learning_rate == 1e-4


def test_settings_are_immutable() -> None:
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.train.rank = 3  # type: ignore[misc]
    assert settings.train.rank == Settings().train.rank


# -------------------------------------------------------------------------------------- overrides from the command line


WHOLE = "machine:\n  nodes: 4\n  rendezvous: one:1\n"


@pytest.mark.parametrize("file", [WHOLE, "train:\n  rank: 4\n", "machine:\n  nodes: 4\n"])
def test_overrides_replace_settings_of_the_file(file: str) -> None:
    machine = params_file.parse(file, overrides={"machine.nodes": "2:3", "machine.rendezvous": "two:29400"}).machine
    assert (machine.nodes, machine.rendezvous) == ("2:3", "two:29400")


def test_settings_that_are_not_overridden_are_as_in_the_file() -> None:
    text = "machine:\n  nodes: 4\n  rendezvous: one:29400\n"
    assert params_file.parse(text, overrides={}) == params_file.parse(text)
    assert params_file.parse(text, overrides={"machine.nodes": "2"}).machine.rendezvous == "one:29400"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.rank", "eight", "override train.rank: found 'eight'"),
        ("rank", 8, "override rank: unknown setting; did you mean train.rank or train."),
        ("", 8, "overrides: found an empty name"),
        ("machine.nodes", "3:2", "--nodes (machine.nodes): found '3:2'"),
        ("train.rnk", 8, "override train.rnk: unknown setting; did you mean rank?"),
        ("sweep.pruner", {"min_resource_fraction": 2}, "override sweep.pruner: min_resource_fraction: found 2"),
        ("sweep.pruner", {"kindd": 1}, "override sweep.pruner: kindd: unknown setting; did you mean kind?"),
        ("sweep.space", {"train.rank": {"low": "x", "high": 8}}, "override sweep.space: train.rank.low: found 'x'"),
        ("sweep.space", {"train.rank": {"low": 9, "high": 8}}, "override sweep.space: train.rank.low: found 9"),
        ("trian.rank", 8, "override trian.rank: unknown setting"),
    ],
)
def test_an_invalid_override_is_refused_by_its_name(key: str, value: object, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        params_file.parse("train:\n  rank: 4\n", overrides={key: value})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "option", "says"),
    [
        ({"nodes": "0"}, "nodes", "found '0'; expected a number of machines"),
        ({"nodes": "3:2"}, "nodes", "found '3:2'; expected a number of machines"),
        ({"nodes": "a"}, "nodes", "found 'a'; expected a number of machines such as 4, or MIN:MAX such as 2:8"),
        ({"nodes": "2", "rendezvous": "somewhere"}, "rendezvous", "found 'somewhere'; expected HOST:PORT"),
        ({"nodes": "2", "rendezvous": "one:0"}, "rendezvous", "found 'one:0'"),
        ({"nodes": "2", "rendezvous": "one:70000"}, "rendezvous", "found 'one:70000'"),
    ],
)
@pytest.mark.parametrize("file", ["train:\n  rank: 4\n", "machine:\n  max_restarts: 1\n"])
def test_an_invalid_option_is_refused_by_its_name_with_the_message_of_the_setting(
    given: dict[str, str], option: str, says: str, file: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        params_file.parse(file, overrides={f"machine.{name}": value for name, value in given.items()})
    assert str(caught.value).startswith(f"--{option} (machine.{option}): {says}")
    assert f"machine.{option}: {says}" in refusal(yaml.safe_dump({"machine": given}))


@pytest.mark.parametrize("file", ["train:\n  rank: 4\n", "machine:\n  max_restarts: 1\n"])
def test_several_machines_without_a_rendezvous_are_refused(file: str) -> None:
    with pytest.raises(SettingsError, match=r"set machine\.rendezvous \(or --rendezvous\) to HOST:PORT"):
        params_file.parse(file, overrides={"machine.nodes": "2"})


# ------------------------------------------------------------------------------------------------------ accepted values


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1e-4", 0.0001), ("1E-4", 0.0001), ("0.0001", 0.0001), ("1.0e-4", 0.0001), ("'1e-4'", 0.0001),
        ('"1e-4"', 0.0001), ("'0.0001'", 0.0001), ("1e-04", 0.0001), ("'1.0E-4'", 0.0001), ("+1e-4", 0.0001),
        # `dvc exp run -S` writes 0.00001 as 1e-05.
        ("1e-05", 0.00001), ("'1e-05'", 0.00001), ("0.00001", 0.00001),
    ],
)  # fmt: skip
def test_a_small_number_is_read_however_it_is_spelled(text: str, rate: float) -> None:
    found = params_file.parse(f"train:\n  learning_rate: {text}\n").train.learning_rate
    assert (found, type(found)) == (rate, float)


def test_a_quoted_count_is_read() -> None:
    assert params_file.parse("train:\n  rank: '8'\n").train.rank == 8


def test_missing_settings_have_their_defaults() -> None:
    assert params_file.parse("version: 2\ntrain:\n  rank: 8\n") == Settings.model_validate({"train": {"rank": 8}})


@pytest.mark.parametrize("prefix", ["\ufeff", "%YAML 1.2\n---\n", "---\n", "\r\n"])
def test_byte_order_marks_and_line_endings_do_not_matter(prefix: str) -> None:
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


# ------------------------------------------------------------------------------------------------- write and read again

AWKWARD_TEXTS = (
    "prompt", "Customer message", "a: b", "# no comment", "it's", 'say "hi"', "back\\slash", "{braces}", "[x]",
    "- item", "null", "~", "true", "No", "on", "1e-4", "007", "1_000", "0x1f", "0o17", "0b11", "2024-01-01",
    "2024-01-01 10:00:00", "12:30", ".5", "nan", ".inf", "=", "<<", "*star", "&and", "!bang", "%percent", "@at",
    "`tick", " leading", "trailing ", "a,b", "über/größe", "日本語", "emoji 🙂", "tab\there", "two\nlines",
    "nbsp\u00a0", "line\u2028separator", "-", "?",
)  # fmt: skip


def test_any_text_round_trips_in_both_yaml_versions() -> None:
    sources = [*AWKWARD_TEXTS, {"files": "x", "columns": {"prompt": "a: b", "response": "# no comment"}}]
    columns = {"prompt": "null", "response": "{braces}", "system": "two\nlines"}
    for given in ({"sources": AWKWARD_TEXTS}, {"sources": sources, "columns": columns}):
        settings = Settings.model_validate({"prepare": given})
        written = params_file.dump(settings)
        assert params_file.parse(written) == settings
        assert Settings.model_validate(without_version(yaml.safe_load(written))) == settings
        assert yaml.safe_load(written)["prepare"]["sources"][: len(AWKWARD_TEXTS)] == list(AWKWARD_TEXTS)


FLOATS = (1e-05, 1e-7, 1.5e-7, 0.1, 1 / 3, 3.0, 100.0, 123456.0, 1234567.0, 1e6, 1e15, 1e16, 1e22, 0.30000000000000004,
          2.0000000001, 1234567890.5, 5e-324, 1.7976931348623157e308)  # fmt: skip


def test_any_number_round_trips_in_both_yaml_versions() -> None:
    settings = Settings.model_validate({"sweep": {"space": {"train.alpha": {"choices": FLOATS}}}})
    written = params_file.dump(settings)
    assert params_file.parse(written).sweep.space["train.alpha"].choices == FLOATS
    found = yaml.safe_load(written)["sweep"]["space"]["train.alpha"]["choices"]
    assert found == list(FLOATS)
    assert all(isinstance(number, int | float) for number in found)
    settings = Settings.model_validate({"train": {"alpha": 1e-05}})
    assert params_file.parse(params_file.dump(settings)).train.alpha == 1e-05


def test_every_default_is_written_with_its_description() -> None:
    def describe(section: type[Section]) -> list[tuple[str, str]]:
        described, descriptions = [], section.descriptions()
        for name, field in section.model_fields.items():
            inner = field.annotation
            below = describe(inner) if isinstance(inner, type) and issubclass(inner, Section) else []
            described += below if section is Settings else [(name, descriptions.get(name, "")), *below]
        return described

    text = params_file.dump(Settings())
    assert params_file.parse(text) == Settings()
    unwrapped = re.sub(r"\n +# ", " ", text)
    for name, description in describe(Settings):
        assert description.endswith((".", "...}.")), f"{name} has no description"
        assert f" {description}" in unwrapped
        assert f"{name}:" in text
    assert "Default: 16.\n  rank: 16\n" in text
    assert max(len(line) for line in text.splitlines() if "# " in line) <= 120


def bounds(metadata: tuple[Any, ...]) -> tuple[float, float]:
    """Return the open ends of the range that the constraints of a number allow, limited to -1e6 and 1e7."""
    low, high = -1e6, 1e7
    parts = [part for constraint in metadata for part in getattr(constraint, "metadata", [constraint])]
    for part in parts:
        low = max([low, *(getattr(part, name) for name in ("ge", "gt") if getattr(part, name, None) is not None)])
        high = min([high, *(getattr(part, name) for name in ("le", "lt") if getattr(part, name, None) is not None)])
    return low, high


def draw(rng: random.Random, annotation: Any, metadata: tuple[Any, ...] = ()) -> Any:  # noqa: PLR0911
    """Return a random value that this annotation allows, in the form in which a document holds it."""
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
    "evaluation_batch_size": lambda rng: rng.choice(["auto", 1, 64]),
    "labels": lambda rng: rng.choice([[], ["ham", "no spam"], ["null", "1.5", "\U0001f642"]]),
    "filters": lambda rng: [],
    "callbacks": lambda rng: [],
    "loggers": lambda rng: rng.choice([[], ["mlflow"], ["json_lines", "tensorboard"]]),
    "function": lambda rng: None,
    "metrics": lambda rng: rng.choice([[], ["bleu"], ["token_f1", "length"]]),
    "answer_format": lambda rng: rng.choice([None, "json", r"\d+: [a-z]*", "^(yes|no)$"]),
    "sources": lambda rng: several(rng, [SourceSettings], 1, 3),
    "rules": lambda rng: several(rng, RULES, 1, 4),
    "hooks": lambda rng: several(rng, [HookSettings], 0, 2),
    "additional_adapters": lambda rng: several(rng, [AdditionalAdapterSettings], 0, 2),
    "additional_judges": lambda rng: [],
    "perturbations": lambda rng: rng.choice([[], ["typos"], ["case", "paraphrase"]]),
    "types": lambda rng: rng.choice([[], ["q8_0"], ["f16", "q4_k_m"]]),
    "max_shard_size": lambda rng: rng.choice([1, 4_000_000_000]),
    "space": lambda rng: {
        key: random_parameter(rng) for key in rng.sample(PARAMETERS, rng.randint(1, len(PARAMETERS)))
    },
    "objectives": lambda rng: [{"metric": one} for one in rng.sample(sorted(DIRECTIONS), rng.randint(1, 3))],
    "study_storage": lambda rng: rng.choice([None, "postgresql://me@host:5432/studies?sslmode=require"]),
    "tracking_uri": lambda rng: rng.choice([None, "https://mlflow.example:5000/team"]),
    "gpus": lambda rng: rng.choice(["auto", 1, 4]),
    "nodes": lambda rng: rng.choice(["1", "8", "2:8"]),
    "rendezvous": lambda rng: rng.choice(["node-1.example:29400", "10.0.0.7:29400"]),
    "replica": lambda rng: rng.choice([None, "s3://bucket/a folder", "/mnt/shared", "az://box/runs"]),
    "replica_mirror": lambda rng: rng.choice([None, "s3://bucket-eu/a folder"]),
    "replica_bytes_per_s": lambda rng: rng.choice([None, 1, 20_000_000]),
    "log_max_bytes": lambda rng: rng.choice([4096, 10_000_000]),
    "metrics_port": lambda rng: rng.choice([None, 1, 9464, 65535]),
    "metrics_file": lambda rng: rng.choice([None, "/var/lib/a folder/ratchet.prom"]),
    "base_url": lambda rng: rng.choice(["http://127.0.0.1:8000/v1", "https://judge.example"]),
    "reasoning_tags": lambda rng: rng.choice([["<think>", "</think>"], ["[THINK]", "[/THINK]"]]),
    "limits": lambda rng: rng.choice([{}, {"malformed": 0.5}, {"leaked": 0, "near_duplicate": None}]),
    "max_kl": lambda rng: rng.choice([{}, {"q8_0": 0.5}, {"int8": 1e-3, "f16": 2}]),
}
"""Random values of fields whose annotation does not describe them, or that hold lists of sections."""


PARAMETERS = ["train.rank", "train.alpha", "train.adalora.target_rank", "train.target_modules", "über.größe"]


def random_parameter(rng: random.Random) -> dict[str, Any]:
    low = rng.choice([1, 0.5, 1e-5, 3.25e-7])
    kinds: list[dict[str, Any]] = [
        {"low": low, "high": low * rng.randint(1, 9), "log": True},
        {"low": -low, "high": low, "step": low / 4},
        {"choices": [None, True, 3, 1e-5, "all", "yes", "1e-4", ["q_proj", "v_proj"]]},
        {"tie": rng.choice(["2 * train.rank", "rank", "train.rank / 2"])},
    ]
    when = rng.choice([{}, {"train.adapter": "lora"}, {"train.adapter": ["lora", "dora"], "train.double": True}])
    return rng.choice(kinds) | ({"when": when} if when else {})


def random_section(rng: random.Random, section: type[Section]) -> dict[str, Any]:  # noqa: PLR0912, PLR0915 (case per class)
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
    # Keep one of each group of mutually exclusive settings.
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
    if section is Train:  # each allowed combination of adapter and other settings must survive the round trip
        ways = [
            {"adapter": "lora", "initialization": "pissa", "quantization": "none", "init_adapter": None},
            {"adapter": "lora", "initialization": "zero"},
            {"adapter": "dora", "initialization": rng.choice(["zero", "gaussian", "eva"]), "init_adapter": None},
        ]
        if found["distill"]["teacher"] is not None or "token_accuracy" in found["early_stopping"]["metrics"]:
            found["objective"] = "sft"
        found["batch_size"] += 1  # kto needs two
        found |= rng.choice(ways) | {"adapter_dtype": rng.choice(["float32", "bfloat16"])}
        found["final_learning_rate_share"] = 0.25  # an exponential decay needs one
        found["target_modules"] = rng.choice(["all", "mlp", ["q_proj", "*star"], r".*\.\d+\.v_proj"])
    if section is EarlyStoppingSettings:
        found["metrics"] = rng.choice([["loss"], ["token_accuracy"], ["loss", "token_accuracy"]])
    if section is GuardSettings:
        found["window_steps"] += 2  # on_rising_loss needs ten
    if section is DistillSettings and found["top_k"] is None:
        found["mode"] = "online"
    if section is JudgeSettings:
        found["against"] = rng.choice([["base"], ["champion", "base"], ["anchor", "champion"]])
    if section is OnnxSettings:
        found["types"] = rng.choice([[], ["fp32", "int8"]])
    if section is BitsAndBytesSettings:
        found["types"] = rng.choice([[], ["int8"]])
    if section is Export and not found["additional_adapters"]:
        found["merge_method"] = "linear"
    if section is Settings and rng.random() < 0.5:
        found["evaluate"]["formats"] = ["merged"]
    elif section is Settings:  # scores of the adapter do not apply to another update
        found["export"] |= {"weight": 1, "additional_adapters": [], "merge_method": "linear", "modules": []}
    if section is Sweep:
        found["name"] = rng.choice(["sweep", "on", "1e4", "A_b-3"])
    if section is Sweep and len(found["objectives"]) > 1:  # pruning needs a single objective that orders the trials
        found["pruner"]["kind"] = "none"
        found["sampler"]["kind"] = rng.choice(["tpe", "gp", "random", "grid"])
    if section is Sweep and found["pruner"]["kind"] == "freeze_thaw":  # not every space has it
        found["pruner"]["kind"] = "auto"
    if section is HookSettings:
        found |= rng.choice([{"webhook": None}, {"webhook": "https://example.org/hook", "command": []}])
    if section is Base:
        found["trust_remote_code"] = rng.choice([None, found["source"]])
    if section is SourceSettings:
        found["streaming"] = bool(found["dataset"])
    if section is QualitySettings:
        found["drop"] = [check for check in found["drop"] if check not in ("language", "low_score")]
        found |= rng.choice([{"field": None, "minimum": None}, {"field": "score", "minimum": 2.5}])
    if section is Prepare:
        found["languages"] = rng.choice([[], ["en", "de"]])
        if found["task"] == "preferences":
            found["too_long"] = "drop"
        else:
            for one in (found, *found["sources"]):
                one["columns"] = one["columns"] and one["columns"] | {"label": None}
        if found["task"] != "text":
            found["canaries"] = 0
    if section is SourceSettings and found["split"] in ("validation", "test"):
        found["weight"] = 1
    # Weight and balance both set how often rows occur.
    if section is Prepare and any(one["weight"] != 1 for one in found["sources"]):
        found["balance"]["by"] = None
    if section is RewardSettings and found["command"]:
        found["function"] = None
    elif section is RewardSettings and found["function"] is None:
        found |= {"min_score": None, "select_best": False}
    elif section is SemanticDuplicateSettings and found["model"] is None:
        found["threshold"] = 0.95
    if section is Select:
        found |= {
            "answer_format": rng.choice([None, "json", "labels", r"\d+"]),
            "final_answer_pattern": rng.choice([None, r"= (\d+)$"]),
        }
        found |= {"finish_reasons": rng.choice([["stop"], ["length", "context"]])}
        found |= {"max_characters": rng.choice([None, 10**9])}
    return found


@pytest.mark.parametrize("text", ["0", "-3", "soon", "0 min", "10 parsecs", "1.5", "10min", "[1]", "null"])
def test_an_invalid_interval_is_refused_with_one_message(text: str) -> None:
    with pytest.raises(SettingsError, match=r"machine\.checkpoint_every: found .* a number of steps") as raised:
        params_file.parse(f"machine:\n  checkpoint_every: {text}\n")
    assert len(str(raised.value).splitlines()) == 1


def test_a_single_source_needs_no_list() -> None:
    one = params_file.parse("prepare:\n  sources: data/raw/x.csv\n  leakage: {files: data/raw/y.csv}\n")
    many = params_file.parse("prepare:\n  sources: [data/raw/x.csv]\n  leakage: {files: [data/raw/y.csv]}\n")
    assert one == many


@pytest.mark.parametrize("seed", range(15))
def test_random_settings_round_trip_in_both_yaml_versions(seed: int) -> None:
    settings = Settings.model_validate(random_section(random.Random(seed), Settings))
    written = params_file.dump(settings)
    assert params_file.parse(written) == settings
    assert Settings.model_validate(without_version(yaml.safe_load(written))) == settings


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("train: {initialization: pissa}", "16 and 32 bits only"),
        ("train: {initialization: pissa, quantization: none, adapter: dora}", "supports plain LoRA only"),
        ("train: {adapter: adalora, rank: 8}", r"expected less than the initial rank \(8\)"),
        (
            "train: {adapter: adalora, adalora: {warmup_ratio: 0.5, final_ratio: 0.6}}",
            "no steps in which ranks can shrink",
        ),
        ("train: {adapter: adalora, use_rslora: true}", "adapts ranks itself"),
        ("train: {objective: dpo, distill: {teacher: t}}", "objective: dpo has no teacher"),
        ("train: {objective: ipo, early_stopping: {metrics: [token_accuracy]}}", "objective: ipo does not compute"),
        ("train: {objective: kto, batch_size: 1}", "batch_size: found 1; objective: kto compares"),
        ("prepare: {columns: {label: good}}", "columns.label: found good with task text"),
        ("train: {adapter: adalora, loraplus_lr_ratio: 4}", "LoRA's two matrices"),
        ("train: {adapter: adalora, guards: {on_spike: roll_back}}", "ranks that adalora has removed"),
        ("train: {alpha: 0}", "alpha"),
        ("train: {rank: 0}", "rank"),
        (
            "base: {source: owner/model, revision: main, trust_remote_code: other/model}",
            "expected the same as base.source",
        ),
        ("sweep: {space: {train.rank: {low: 8, high: 4}}}", r"low: found 8; expected at most high \(4\)"),
        (
            "sweep: {space: {train.dropout: {low: 0, high: 0.5, log: true}}}",
            "low: found 0; expected a number > 0 because log is true",
        ),
        ("sweep: {space: {train.rank: {low: 8}}}", "high: missing; set both low and high"),
        (
            "sweep: {space: {train.rank: {low: 8, high: 16, choices: [8]}}}",
            "expected either low and high, or choices, or tie",
        ),
        ("sweep: {space: {train.rank: {}}}", "expected either low and high, or choices, or tie"),
        ("sweep: {space: {train.rank: {low: 1, high: 9, log: true, step: 2}}}", "a logarithmic range has no step"),
        ("sweep: {space: {train.rank: {choices: [8, 8]}}}", "found the same value twice"),
        ("sweep: {objectives: [{metric: perplexity}]}", "unknown metric 'perplexity'; expected one of: "),
        ("sweep: {objectives: [{metric: accuracy}, {metric: accuracy}]}", "found the same metric twice"),
        ("sweep: {objectives: [{metric: accuracy}, {metric: memory_bytes}]}", "needs a single objective"),
        ("sweep: {name: a/b}", "sweep.name"),
        ("machine: {study_storage: 'postgresql://me:hidden@host/db'}", "expected an address without a password"),
        (
            "machine: {study_storage: 'sqlite:///hidden.db'}",
            "expected postgresql://.*; an SQLite file cannot be",
        ),
        ("machine: {study_storage: 'postgresql://me@host'}", "the address has no database; expected postgresql://"),
        ("train: {target_modules: '(q_proj'}", r"found '\(q_proj'; .*regular expression \(missing"),
        ("machine: {tracking_uri: 'https://me:hidden@host'}", "without user and password.*MLFLOW_TRACKING_PASSWORD"),
        ("machine: {tracking_uri: 'postgresql://host/mlflow'}", "expected the address of an MLflow server, http"),
        ("machine: {ray: {gpus: -1}}", "found -1; expected a number of GPUs >= 0, or auto"),
        ("machine: {replica: 's3://key:hidden@bucket/x'}", "expected a URL without a password or query"),
        ("machine: {replica: 'https://host/x?sig=hidden'}", "expected a URL without a password or query"),
        ("machine: {replica: bucket/folder}", "expected a URL such as s3://"),
        (
            "machine: {replica: 'memory://x'}",
            "machine.replica: .*scheme memory cannot hold a replica",
        ),
        ("machine: {replica: 'https://host/x'}", "scheme https cannot hold a replica"),
        (
            "machine: {replica: s3://b, replica_bytes_per_s: 20 snails}",
            "expected a number of bytes, or a size such as 20MB",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused_with_the_reason(section: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        params_file.parse(section + "\n")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense://x/y", "scheme nonsense cannot hold a replica"),
        ("S3:///folder", "expected s3://BUCKET/FOLDER with the name of a bucket"),
        ("s3://user@bucket/folder", "expected s3://BUCKET/FOLDER with the name of a bucket"),
        ("gs:///folder", "expected gs://BUCKET/FOLDER"),
        ("az:///folder", "expected az://BUCKET/FOLDER"),
        ("sftp://me:planted@host/x", "expected a URL without a password or query"),
        ("abfs://box/x?se=planted", "expected a URL without a password or query"),
        ("sftp://host:port/x", "expected a URL with a valid host and port"),
        ("sftp://[::1/x", "expected a URL with a valid host and port"),
        ("s3://bucket/x#y", "expected a URL without #"),
        ("file://folder/x", "expected file:///FOLDER, an absolute path"),
        ("file:/folder/x", "expected a URL such as s3://BUCKET/FOLDER, or an absolute path"),
        ("arrow_hdfs://host/x", "expected a URL such as s3://BUCKET/FOLDER, or an absolute path"),
        ("simplecache::s3://box/x", "expected a URL such as s3://BUCKET/FOLDER, or an absolute path"),
        ("sftp://host/x", "scheme sftp cannot hold a replica (mount other storage as a folder"),
        ("{here}/file", "expected a folder, but {here}/file is not one"),
        ("file://{here}/file/replica", "expected a folder, but {here}/file is not one"),
        ("/a\u202eb", "expected an address without control characters"),
    ],
)
def test_the_address_of_a_replica_is_checked_when_settings_are_loaded(tmp_path: Path, url: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    url, reason = url.format(here=tmp_path), reason.format(here=tmp_path)
    said = refusal(f'train: {{}}\nmachine:\n  replica: "{url}"\n')
    assert said.startswith("params.yaml:3: machine.replica: found '")
    assert reason in said
    assert "planted" not in said


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3a://bucket/a folder",
        "gs://bucket/x",
        "abfss://box@account.dfs.core.windows.net/x",
        "/not/there",
        "file:///not%20/x",
    ],
)
def test_a_replica_is_accepted_without_contacting_it(url: str) -> None:
    assert params_file.parse(f'machine: {{replica: "{url}"}}\n').machine.replica == url


def test_stored_settings_do_not_depend_on_the_disk_of_the_replica(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stored = machine.Machine(replica=str(tmp_path / "file"))
    assert machine.Machine.model_validate_json(stored.model_dump_json()) == stored


def test_a_disk_that_does_not_answer_delays_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "STAT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Path, "exists", lambda _: time.sleep(5))
    assert machine.find_replica_environment_problem(str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (
            "train:\n  adapter: adalora\n  rank: 8\n",
            "params.yaml:1: train.adalora.target_rank: found 8; expected less than",
        ),
        (
            "prepare:\n  sources: [{files: a, dataset: b}]\n",
            "params.yaml:2: prepare.sources.0: expected either files or",
        ),
    ],
)
def test_the_message_for_settings_that_exclude_each_other_names_their_keys(text: str, begin: str) -> None:
    assert refusal(text).startswith(begin)
    assert "{" not in refusal(text)


def test_settings_of_two_sections_that_exclude_each_other_are_refused() -> None:
    message = refusal("export:\n  weight: 0.5\n")
    assert message.startswith("params.yaml: evaluate.formats: export.weight,")
    assert "evaluate.formats: [merged]" in message


def without_version(written: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a params.yaml."""
    return {name: value for name, value in written.items() if name != "version"}


def test_a_setting_that_became_a_constant_is_accepted_with_its_value_and_refused_with_another() -> None:
    text = "version: 2\nprepare:\n  deduplication:\n    shingle_words: {}\n"
    assert params_file.parse(text.format(3)) == Settings()
    with pytest.raises(SettingsError) as caught:
        params_file.parse(text.format(5))
    assert str(caught.value) == (
        "params.yaml:4: prepare.deduplication.shingle_words: found 5; it is no setting any more and always 3; remove it"
    )


def test_a_copy_with_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="DeduplicationSettings has no setting shingle_words"):
        Settings().prepare.deduplication.model_copy(update={"shingle_words": 5})
