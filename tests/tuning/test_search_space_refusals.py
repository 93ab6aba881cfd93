"""Tests invalid search spaces: each is refused with the key in params.yaml, the value found, and the remedy."""

import pytest

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError
from ratchet.tuning.search_space import SearchSpace


def refusal(space: str) -> str:
    with pytest.raises(SettingsError) as refused:
        SearchSpace.from_settings(params_file.parse(f"sweep: {{space: {{{space}}}}}"))
    return str(refused.value)


RANGE = "{low: 1, high: 2}"


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (f"train.rnk: {RANGE}", ["unknown setting", "did you mean train.rank"]),
        (f"rank: {RANGE}", ["unknown setting", "did you mean train.rank"]),
        (f"max_tokens: {RANGE}", ["unknown setting", "prepare.max_tokens"]),
        (f"train.rank_pattern.q_proj: {RANGE}", ["unknown setting", "train.rank_pattern"]),
        (f"xyzzy: {RANGE}", ["unknown setting", "only settings of section train can be searched"]),
        (f"machine.threads: {RANGE}", ["does not change results", "set it in section machine"]),
        (f"machine.anything: {RANGE}", ["does not change results"]),
        (f"prepare.max_tokens: {RANGE}", ["same data and the same base", "dvc exp run -S prepare.max_tokens="]),
        (f"base.tiny.layers: {RANGE}", ["same data and the same base", "dvc exp run -S base.tiny.layers="]),
        (f"evaluate.max_new_tokens: {RANGE}", ["section evaluate does not affect training"]),
        (f"sweep.trials: {RANGE}", ["section sweep does not affect training"]),
        (f"train.guards: {RANGE}", ["found a section", "train.guards.max_bad_steps"]),
        (f"train: {RANGE}", ["found a section", "train.quantization", "more"]),
        (f"train.seed: {RANGE}", ["a seed cannot be searched", "finalists"]),
        (f"train.rank_pattern: {RANGE}", ["has a value for each name"]),
        ("train.rank_pattern: {choices: [4]}", ["has a value for each name"]),
        (f"train.final_checkpoint: {RANGE}", ["not a number", "choices: [best, last]"]),
        (f"train.double_quantization: {RANGE}", ["not a number", "choices: [false, true]"]),
        (f"train.target_modules: {RANGE}", ["not a number", "list its values"]),
        ("train.rank: {low: 1.5, high: 4}", ["low: found 1.5", "whole number"]),
        ("train.rank: {low: 1, high: 4.5}", ["high: found 4.5", "whole number"]),
        ("train.rank: {low: 1, high: 4, step: 0.5}", ["step: found 0.5", "whole number"]),
        (
            "train.dropout: {low: 0, high: 0.9, step: 0.27187392759755413}",
            ["step: steps of 0.27187392759755413", "use fewer digits"],
        ),
        ("train.rank: {low: 0, high: 4}", ["low: found 0", "greater than or equal to 1"]),
        ("train.dropout: {low: 0, high: 1}", ["high: found 1", "less than 1"]),
        ("train.rank: {choices: [4, 0]}", ["choices: found 0", "greater than or equal to 1"]),
        ("train.rank: {choices: [4, 4.5]}", ["choices: found 4.5", "integer"]),
        ("train.rank: {choices: [4, null]}", ["choices: found null", "integer"]),
        ("train.alpha: {choices: [8, 8.0]}", ["choices: found 8 twice"]),
        ("train.final_checkpoint: {choices: [best, lest]}", ["choices: found lest", "'best' or 'last'"]),
        ("train.double_quantization: {choices: [1, 0]}", ["choices: found 1", "boolean"]),
        ("train.target_modules: {choices: [all, 3]}", ["choices: found 3"]),
        ("train.alpha: {tie: 2 x rank}", ["tie: found '2 x rank'", "NUMBER * SETTING"]),
        ("train.alpha: {tie: 2 * rank * 3}", ["expected NUMBER * SETTING"]),
        ("train.alpha: {tie: -1 * rank}", ["expected NUMBER * SETTING"]),
        ("train.alpha: {tie: 2 / rank}", ["expected NUMBER * SETTING"]),
        ("train.alpha: {tie: rank + 1}", ["expected NUMBER * SETTING"]),
        ("train.alpha: {tie: rank / 0}", ["expected a factor other than 0"]),
        ("train.alpha: {tie: 0 * rank}", ["expected a factor other than 0"]),
        ("train.alpha: {tie: 2 * rnk}", ["tie: rnk is not a setting of section train", "train.rank"]),
        ("train.alpha: {tie: machine.threads}", ["machine.threads is not a setting of section train"]),
        ("train.final_checkpoint: {tie: 2 * rank}", ["train.final_checkpoint is not a number"]),
        ("train.alpha: {tie: final_checkpoint}", ["train.final_checkpoint may be best, which is not a number"]),
        ("train.final_checkpoint: {tie: rank}", ["if train.rank is 16", "'best' or 'last'"]),
        ("train.batch_size: {tie: rank / 3}", ["train.rank may be 16", "not a whole number"]),
        (
            f"train.dropout: {{low: 0, high: 0.1, when: {{adaptor: dora}}}}, train.rank: {RANGE}",
            ["when: adaptor is not a setting of section train", "did you mean train.adapter"],
        ),
        ("train.dropout: {low: 0, high: 0.1, when: {adapter: dura}}", ["when: adapter: found dura", "'dora'"]),
        (
            "train.dropout: {choices: [0], when: {adapter: lora, train.adapter: dora}}",
            ["when: found train.adapter twice"],
        ),
        ("train.dropout: {low: 0, high: 0.1, when: {adapter: []}}", ["when: adapter: found an empty list"]),
    ],
)
def test_a_parameter_that_makes_no_sense(parameter: str, words: list[str]) -> None:
    message = refusal(parameter)
    assert message.startswith(f"params.yaml: sweep.space.{parameter.partition(': ')[0]}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


HALF = "train.batch_size: {tie: rank / 2}"
IF_DORA = "train.dropout: {low: 0, high: 0.1, when: {adapter: dora}}"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (f"train.rank: {{low: 2, high: 8}}, {HALF}", "train.rank may be 3, and 1.5 is not a whole number"),
        (f"train.rank: {{low: 2, high: 8, log: true}}, {HALF}", "train.rank may be 3"),
        (f"train.rank: {{choices: [2, 4, 7]}}, {HALF}", "train.rank may be 7"),
        ("train.rank: {low: 2, high: 8, step: 2}, train.batch_size: {tie: rank / 4}", "train.rank may be 2"),
        # A conditional parameter falls back to the value in params.yaml, which must fit the tie as well.
        (
            "train.adapter: {choices: [lora, dora]}, train.rank: {choices: [3, 6], when: {adapter: lora}},"
            " train.batch_size: {tie: rank / 3}",
            "train.rank may be 16",
        ),
        ("train.alpha: {low: 1, high: 2}, train.rank: {tie: 4 * alpha}", "train.alpha takes any value in its range"),
        (
            "train.dropout: {tie: rank / 10}, train.rank: {low: 3, high: 10}",
            "if train.rank is 10: found 1: input should be less than 1",
        ),
        (
            f"train.adapter: {{choices: [lora, adalora]}}, {IF_DORA}",
            "found dora, which it never is; expected lora, adalora",
        ),
        (f"train.adapter: {{tie: optimizer}}, {IF_DORA}", "dora"),
        ("", "sweep.space: found no settings"),
        ("train.alpha: {tie: 2 * rank}", "no setting is searched"),
        ("train.rank: {low: 1, high: 2, when: {adapter: dora}}", "no setting is searched"),
    ],
)
def test_parameters_that_do_not_fit_together_are_refused(parameters: str, words: str) -> None:
    assert words in refusal(parameters)


def test_whole_numbers_follow_where_every_value_fits() -> None:
    for source in ("{low: 2, high: 9, step: 2}", "{choices: [2, 4, 8]}"):
        text = f"sweep: {{space: {{train.rank: {source}, train.batch_size: {{tie: rank / 2}}}}}}"
        values = SearchSpace.from_settings(params_file.parse(text)).grid(2)
        assert [(one["train.batch_size"], type(one["train.batch_size"])) for one in values] == [
            (one["train.rank"] // 2, int) for one in values
        ]


CONDITIONAL = "train.rank: {low: 2, high: 8, step: 3}, train.alpha: {tie: 2 * rank}, train.dropout: {choices: [0.1], "


@pytest.mark.parametrize(("source", "numbers"), [("rank", "[5, 8]"), ("alpha", "[10, 16]")])
def test_a_condition_on_a_range_names_numbers_that_it_has(source: str, numbers: str) -> None:
    text = f"sweep: {{space: {{{CONDITIONAL} when: {{{source}: {numbers}}}}}}}}}"
    assert [len(values) for values in SearchSpace.from_settings(params_file.parse(text)).grid(2)] == [2, 3, 3]


@pytest.mark.parametrize(("source", "number"), [("rank", 6), ("rank", 11), ("alpha", 5), ("alpha", 12)])
def test_a_condition_on_a_number_between_is_refused(source: str, number: int) -> None:
    message = refusal(f"{CONDITIONAL} when: {{{source}: {number}}}}}")
    assert f"when: train.{source}: found {number}, which it never is; expected" in message


@pytest.mark.parametrize(
    ("parameters", "circle"),
    [
        ("train.alpha: {tie: alpha}", "train.alpha -> train.alpha"),
        ("train.alpha: {tie: dropout}, train.dropout: {tie: alpha}", "train.alpha -> train.dropout -> train.alpha"),
        (
            "train.rank: {choices: [1, 2], when: {final_checkpoint: best}}, train.final_checkpoint: {choices: "
            "[best], when: {batch_size: 4}}, "
            "train.batch_size: {tie: 2 * rank}",
            "train.rank -> train.final_checkpoint -> train.batch_size -> train.rank",
        ),
    ],
)
def test_circles_are_shown(parameters: str, circle: str) -> None:
    assert f"depends on itself: {circle};" in refusal(parameters)


def test_all_problems_are_reported_together() -> None:
    lines = refusal(f"train.rnk: {RANGE}, train.alpha: {{low: 1, high: 2}}, machine.threads: {RANGE}").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["sweep.space.train.rnk", "sweep.space.machine.threads"]
    late = "train.alpha: {tie: final_checkpoint}, train.batch_size: {tie: rank / 3}, train.dropout: {choices: [0]}"
    assert len(refusal(late).splitlines()) == 2


def test_combinations_that_settings_refuse_are_left_to_trials() -> None:
    text = "sweep: {space: {train.adapter: {choices: [lora, adalora]}, train.rank: {low: 1, high: 64}}}"
    assert len(SearchSpace.from_settings(params_file.parse(text)).grid(2)) == 4


def test_the_default_space() -> None:
    axes = SearchSpace.from_settings(Settings()).axes()
    assert [axis.name for axis in axes] == ["train.rank", "train.alpha", "train.learning_rate"]
