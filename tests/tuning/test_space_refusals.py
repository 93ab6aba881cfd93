"""Search spaces that make no sense: each is refused with the key in params.yaml, what was found, and what to do."""

import pytest

from ratchet.config import params_file
from ratchet.config.schema import Settings
from ratchet.errors import SettingsError
from ratchet.tuning.search_space import SearchSpace


def refusal(space: str) -> str:
    with pytest.raises(SettingsError) as refused:
        SearchSpace.of(params_file.parse(f"sweep: {{space: {{{space}}}}}"))
    return str(refused.value)


RANGE = "{low: 1, high: 2}"


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        (f"train.rnk: {RANGE}", ["no such setting", "did you mean train.rank"]),
        (f"rank: {RANGE}", ["no such setting", "did you mean train.rank"]),
        (f"max_tokens: {RANGE}", ["no such setting", "prepare.max_tokens"]),
        (f"train.rank_pattern.q_proj: {RANGE}", ["no such setting", "train.rank_pattern"]),
        (f"xyzzy: {RANGE}", ["no such setting", "what can be searched are settings of section train"]),
        (f"machine.threads: {RANGE}", ["says how, not what is learned", "set it in machine"]),
        (f"machine.anything: {RANGE}", ["says how, not what is learned"]),
        (f"prepare.max_tokens: {RANGE}", ["same rows and the same base", "dvc exp run -S prepare.max_tokens="]),
        (f"base.tiny.layers: {RANGE}", ["same rows and the same base", "dvc exp run -S base.tiny.layers="]),
        (f"evaluate.max_new_tokens: {RANGE}", ["evaluate changes nothing that is learned"]),
        (f"sweep.trials: {RANGE}", ["sweep changes nothing that is learned"]),
        (f"train.guards: {RANGE}", ["a section", "train.guards.patience"]),
        (f"train: {RANGE}", ["a section", "train.quantization", "more"]),
        (f"train.seed: {RANGE}", ["a seed is luck", "finalists"]),
        (f"train.rank_pattern: {RANGE}", ["gives each name a value of its own"]),
        ("train.rank_pattern: {choices: [4]}", ["gives each name a value of its own"]),
        (f"train.keep: {RANGE}", ["for numbers", "choices: [best, last]"]),
        (f"train.double_quantization: {RANGE}", ["for numbers", "choices: [false, true]"]),
        (f"train.targets: {RANGE}", ["for numbers", "list its values"]),
        ("train.rank: {low: 1.5, high: 4}", ["low: found 1.5", "whole number"]),
        ("train.rank: {low: 1, high: 4.5}", ["high: found 4.5", "whole number"]),
        ("train.rank: {low: 1, high: 4, step: 0.5}", ["step: found 0.5", "whole number"]),
        (
            "train.dropout: {low: 0, high: 0.9, step: 0.27187392759755413}",
            ["step: 0.27187392759755413", "write it short"],
        ),
        ("train.rank: {low: 0, high: 4}", ["low: found 0", "greater than or equal to 1"]),
        ("train.dropout: {low: 0, high: 1}", ["high: found 1", "less than 1"]),
        ("train.rank: {choices: [4, 0]}", ["choices: found 0", "greater than or equal to 1"]),
        ("train.rank: {choices: [4, 4.5]}", ["choices: found 4.5", "integer"]),
        ("train.rank: {choices: [4, null]}", ["choices: found null", "integer"]),
        ("train.alpha: {choices: [8, 8.0]}", ["choices: 8 twice"]),
        ("train.keep: {choices: [best, lest]}", ["choices: found lest", "'best' or 'last'"]),
        ("train.double_quantization: {choices: [1, 0]}", ["choices: found 1", "boolean"]),
        ("train.targets: {choices: [all, 3]}", ["choices: found 3"]),
        ("train.alpha: {tie: 2 x rank}", ["tie: '2 x rank' is no tie", "NUMBER * SETTING"]),
        ("train.alpha: {tie: 2 * rank * 3}", ["is no tie"]),
        ("train.alpha: {tie: -1 * rank}", ["is no tie"]),
        ("train.alpha: {tie: 2 / rank}", ["is no tie"]),
        ("train.alpha: {tie: rank + 1}", ["is no tie"]),
        ("train.alpha: {tie: rank / 0}", ["0 ties nothing"]),
        ("train.alpha: {tie: 0 * rank}", ["0 ties nothing"]),
        ("train.alpha: {tie: 2 * rnk}", ["tie: rnk is no setting of section train", "train.rank"]),
        ("train.alpha: {tie: machine.threads}", ["machine.threads is no setting of section train"]),
        ("train.keep: {tie: 2 * rank}", ["train.keep is no number"]),
        ("train.alpha: {tie: keep}", ["train.keep may be best, which is no number"]),
        ("train.keep: {tie: rank}", ["where train.rank is 16", "'best' or 'last'"]),
        ("train.batch_rows: {tie: rank / 3}", ["train.rank may be 16", "no whole number"]),
        (
            f"train.dropout: {{low: 0, high: 0.1, when: {{adaptor: dora}}}}, train.rank: {RANGE}",
            ["when: adaptor is no setting of section train", "did you mean train.adapter"],
        ),
        ("train.dropout: {low: 0, high: 0.1, when: {adapter: dura}}", ["when: adapter: found dura", "'dora'"]),
        ("train.dropout: {choices: [0], when: {adapter: lora, train.adapter: dora}}", ["when: train.adapter twice"]),
        ("train.dropout: {low: 0, high: 0.1, when: {adapter: []}}", ["when: adapter: an empty list"]),
    ],
)
def test_a_knob_that_makes_no_sense(knob: str, words: list[str]) -> None:
    message = refusal(knob)
    assert message.startswith(f"params.yaml: sweep.space.{knob.partition(': ')[0]}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


HALF = "train.batch_rows: {tie: rank / 2}"
IF_DORA = "train.dropout: {low: 0, high: 0.1, when: {adapter: dora}}"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (f"train.rank: {{low: 2, high: 8}}, {HALF}", "train.rank may be 3, and 1.5 is no whole number"),
        (f"train.rank: {{low: 2, high: 8, log: true}}, {HALF}", "train.rank may be 3"),
        (f"train.rank: {{choices: [2, 4, 7]}}, {HALF}", "train.rank may be 7"),
        ("train.rank: {low: 2, high: 8, step: 2}, train.batch_rows: {tie: rank / 4}", "train.rank may be 2"),
        # The value of params.yaml, to which a conditional knob falls back, must fit the tie as well.
        (
            "train.adapter: {choices: [lora, dora]}, train.rank: {choices: [3, 6], when: {adapter: lora}},"
            " train.batch_rows: {tie: rank / 3}",
            "train.rank may be 16",
        ),
        ("train.alpha: {low: 1, high: 2}, train.rank: {tie: 4 * alpha}", "train.alpha takes any value in its range"),
        (
            "train.dropout: {tie: rank / 10}, train.rank: {low: 3, high: 10}",
            "where train.rank is 10: found 1: input should be less than 1",
        ),
        (f"train.adapter: {{choices: [lora, adalora]}}, {IF_DORA}", "adapter is never dora; it may be lora, adalora"),
        (f"train.adapter: {{tie: optimizer}}, {IF_DORA}", "dora"),
        ("", "sweep.space is empty"),
        ("train.alpha: {tie: 2 * rank}", "nothing is searched"),
        ("train.rank: {low: 1, high: 2, when: {adapter: dora}}", "nothing is searched"),
    ],
)
def test_knobs_that_do_not_fit_together_are_refused(knobs: str, words: str) -> None:
    assert words in refusal(knobs)


def test_whole_numbers_follow_where_every_value_fits() -> None:
    for source in ("{low: 2, high: 9, step: 2}", "{choices: [2, 4, 8]}"):
        text = f"sweep: {{space: {{train.rank: {source}, train.batch_rows: {{tie: rank / 2}}}}}}"
        values = SearchSpace.of(params_file.parse(text)).grid(2)
        assert [(one["train.batch_rows"], type(one["train.batch_rows"])) for one in values] == [
            (one["train.rank"] // 2, int) for one in values
        ]


CONDITIONAL = "train.rank: {low: 2, high: 8, step: 3}, train.alpha: {tie: 2 * rank}, train.dropout: {choices: [0.1], "


@pytest.mark.parametrize(("source", "numbers"), [("rank", "[5, 8]"), ("alpha", "[10, 16]")])
def test_a_condition_on_a_range_names_numbers_that_it_has(source: str, numbers: str) -> None:
    text = f"sweep: {{space: {{{CONDITIONAL} when: {{{source}: {numbers}}}}}}}}}"
    assert [len(values) for values in SearchSpace.of(params_file.parse(text)).grid(2)] == [2, 3, 3]


@pytest.mark.parametrize(("source", "number"), [("rank", 6), ("rank", 11), ("alpha", 5), ("alpha", 12)])
def test_a_condition_on_a_number_between_is_refused(source: str, number: int) -> None:
    message = refusal(f"{CONDITIONAL} when: {{{source}: {number}}}}}")
    assert f"when: train.{source} is never {number}; it may be" in message


@pytest.mark.parametrize(
    ("knobs", "circle"),
    [
        ("train.alpha: {tie: alpha}", "train.alpha -> train.alpha"),
        ("train.alpha: {tie: dropout}, train.dropout: {tie: alpha}", "train.alpha -> train.dropout -> train.alpha"),
        (
            "train.rank: {choices: [1, 2], when: {keep: best}}, train.keep: {choices: [best], when: {batch_rows: 4}}, "
            "train.batch_rows: {tie: 2 * rank}",
            "train.rank -> train.keep -> train.batch_rows -> train.rank",
        ),
    ],
)
def test_circles_are_shown(knobs: str, circle: str) -> None:
    assert f"waits for itself: {circle};" in refusal(knobs)


def test_all_problems_are_reported_together() -> None:
    lines = refusal(f"train.rnk: {RANGE}, train.alpha: {{low: 1, high: 2}}, machine.threads: {RANGE}").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["sweep.space.train.rnk", "sweep.space.machine.threads"]
    late = "train.alpha: {tie: keep}, train.batch_rows: {tie: rank / 3}, train.dropout: {choices: [0]}"
    assert len(refusal(late).splitlines()) == 2


def test_combinations_that_settings_refuse_are_left_to_trials() -> None:
    text = "sweep: {space: {train.adapter: {choices: [lora, adalora]}, train.rank: {low: 1, high: 64}}}"
    assert len(SearchSpace.of(params_file.parse(text)).grid(2)) == 4


def test_the_default_space() -> None:
    axes = SearchSpace.of(Settings()).axes()
    assert [axis.knob for axis in axes] == ["train.rank", "train.alpha", "train.learning_rate"]
