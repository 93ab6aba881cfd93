"""Tests the search space: drawn values are in it, ties and conditions hold, and invalid spaces are refused."""

import json
import random
from functools import partial
from itertools import islice
from math import inf
from typing import Any

import optuna
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.config.sweep import SweepParameter
from ratchet.errors import SettingsError
from ratchet.tuning.search_space import (
    MAX_POINTS,
    SearchDimension,
    SearchSpace,
    apply_values,
    decode_value,
    encode_value,
    snap_value,
    to_distribution,
)
from study_histories import CONDITIONAL, RANK, TARGETS, is_in_space
from study_histories import space_of as make_space

OFTEN = settings(max_examples=150, deadline=None, derandomize=True)


def project(space: str, train: str = "{}") -> Settings:
    """Parse settings with this space, as params.yaml has it."""
    return params_file.parse(f"train: {train}\nsweep:\n  space: {space}\n")


def space_of(space: str, train: str = "{}") -> SearchSpace:
    return SearchSpace.from_settings(project(space, train))


WIDE = """
    train.alpha: {tie: 2 * rank}
    train.rank: {low: 4, high: 64, log: true}
    train.learning_rate: {low: 1e-4, high: 1e-2, log: true}
    train.adalora.target_rank: {low: 2, high: 9, step: 3, when: {adapter: adalora}}
    train.adapter: {choices: [lora, adalora]}
    train.dropout: {low: 0, high: 0.35, step: 0.1}
    train.target_modules: {choices: [all, [q_proj, v_proj]]}
"""


def first(dimension: SearchDimension) -> Any:
    return dimension.choices[0] if dimension.kind == "choice" else dimension.low


def last(dimension: SearchDimension) -> Any:
    return dimension.choices[-1] if dimension.kind == "choice" else dimension.high


def test_each_knob_is_drawn_after_what_it_depends_on_and_else_in_the_order_of_the_file() -> None:
    space, asked = space_of(WIDE), []

    def pick(dimension: SearchDimension) -> Any:
        asked.append(dimension.name.removeprefix("train."))
        return last(dimension)

    values = space.draw(pick)
    assert asked == ["rank", "learning_rate", "adapter", "adalora.target_rank", "dropout", "target_modules"]
    assert values == {
        "train.rank": 64,
        "train.alpha": 128.0,
        "train.learning_rate": 0.01,
        "train.adapter": "adalora",
        "train.adalora.target_rank": 8,
        "train.dropout": 0.3,
        "train.target_modules": ("q_proj", "v_proj"),
    }
    assert "train.adalora.target_rank" not in space.draw(first)  # its condition is not met


def test_axes_say_what_plots_need_and_upper_ends_are_reached_by_steps() -> None:
    space = space_of(WIDE)
    axes = {axis.name: axis for axis in space.axes()}
    assert list(axes)[:2] == ["train.rank", "train.alpha"]
    rank, tied = axes["train.rank"], axes["train.alpha"]
    assert (rank.kind, rank.low, rank.high, rank.log, rank.conditional) == ("int", 4, 64, True, False)
    assert (tied.kind, tied.tie) == ("tie", "2 * train.rank")
    assert axes["train.adalora.target_rank"].conditional
    assert axes["train.target_modules"].choices == ("all", ("q_proj", "v_proj"))
    assert space.dimension("train.adalora.target_rank").high == 8
    assert space.dimension("train.dropout").high == 0.3
    assert [to_distribution(one).single() for one in space.dimensions()] == [False] * 6


@pytest.mark.parametrize(
    ("tie", "source", "value"),
    [
        ("2 * rank", "{low: 4, high: 4}", 8.0),
        ("rank*2", "{low: 4, high: 4}", 8.0),
        ("train.rank / 3", "{choices: [4]}", 4 / 3),
        ("train.rank", "{choices: [5]}", 5.0),
        ("0.1 * rank", "{choices: [3]}", 0.3),
        ("rank * 1e-3", "{choices: [7]}", 0.007),
        ("rank * 7.5e-2", "{choices: [60]}", 4.5),
    ],
)
def test_ties_are_computed_exactly_and_rounded_once(tie: str, source: str, value: float) -> None:
    drawn = space_of(f"{{train.rank: {source}, train.alpha: {{tie: {tie}}}}}").draw(first)["train.alpha"]
    assert drawn == value
    assert isinstance(drawn, float)


def test_ties_count_in_decimals_as_people_do() -> None:
    space = space_of(
        "{train.dropout: {low: 0.1, high: 0.3, step: 0.1}, train.warmup_ratio: {tie: 3 * dropout},"
        " train.batch_size: {tie: 10 * dropout}, train.rank: {choices: [1, 2], when: {warmup_ratio: 0.9}}}"
    )
    assert [tuple(values.values()) for values in space.grid(2)] == [
        (0.1, 0.3, 1),
        (0.2, 0.6, 2),
        (0.3, 0.9, 3, 1),
        (0.3, 0.9, 3, 2),
    ]


def test_a_tie_may_follow_a_tie_a_fixed_setting_and_a_word() -> None:
    space = space_of(
        "{train.batch_size: {tie: validate_every_steps / 5}, train.alpha: {tie: adalora.target_rank / 2},"
        " train.adalora.target_rank: {tie: rank * 3}, train.rank: {choices: [2, 6]},"
        " train.adapter_dtype: {tie: compute_dtype}, train.compute_dtype: {choices: [float32, bfloat16]}}",
        "{validate_every_steps: 40}",
    )
    assert space.draw(last) == {
        "train.batch_size": 8,
        "train.rank": 6,
        "train.adalora.target_rank": 18,
        "train.alpha": 9.0,
        "train.compute_dtype": "bfloat16",
        "train.adapter_dtype": "bfloat16",
    }


def test_where_the_other_knob_is_not_searched_ties_and_conditions_take_it_as_it_is_in_params_yaml() -> None:
    space = space_of(
        "{train.adapter: {choices: [lora, dora]}, train.rank: {choices: [4, 8], when: {adapter: lora}},"
        " train.alpha: {tie: 2 * rank}, train.warmup_ratio: {choices: [0.1, 0.2], when: {rank: [16, 4]}}}",
        "{rank: 16}",
    )
    assert space.draw(last) == {"train.adapter": "dora", "train.alpha": 32.0, "train.warmup_ratio": 0.2}
    assert space.draw(first) == {
        "train.adapter": "lora",
        "train.rank": 4,
        "train.alpha": 8.0,
        "train.warmup_ratio": 0.1,
    }
    assert len(list(space.iterate_points())) == 2 + 1 + 2  # rank 4 with two warm-ups, rank 8 without, dora with two


def test_a_condition_on_a_setting_that_is_not_searched_holds_always_or_never() -> None:
    always = "{train.rank: {low: 1, high: 2}, train.dropout: {choices: [0, 0.1], when: {adapter: [lora, dora]}}}"
    assert [axis.conditional for axis in space_of(always).axes()] == [False, False]
    never = (
        "{train.rank: {low: 1, high: 2}, train.dropout: {choices: [0, 0.1], when: {adapter: dora}},"
        " train.warmup_ratio: {tie: dropout}, train.weight_decay: {choices: [0, 1], when: {dropout: 0.1}}}"
    )
    space = space_of(never, "{dropout: 0.3}")
    assert space.draw(last) == {"train.rank": 2, "train.warmup_ratio": 0.3}


def test_a_grid_has_every_combination_once_and_the_last_knob_changes_fastest() -> None:
    space = space_of(
        "{train.rank: {low: 4, high: 64, log: true}, train.adapter: {choices: [lora, adalora]},"
        " train.adalora.target_rank: {choices: [1, 2], when: {adapter: adalora}},"
        " train.learning_rate: {low: 1e-4, high: 1e-2, log: true}}"
    )
    grid = space.grid(3)
    assert [tuple(values.values()) for values in grid[:10]] == [
        (4, "lora", 0.0001),
        (4, "lora", 0.001),
        (4, "lora", 0.01),
        (4, "adalora", 1, 0.0001),
        (4, "adalora", 1, 0.001),
        (4, "adalora", 1, 0.01),
        (4, "adalora", 2, 0.0001),
        (4, "adalora", 2, 0.001),
        (4, "adalora", 2, 0.01),
        (16, "lora", 0.0001),
    ]
    assert len(grid) == 3 * (1 + 2) * 3
    assert not space.is_finite


def test_a_grid_takes_every_step_and_no_number_twice() -> None:
    space = space_of("{train.rank: {low: 1, high: 3}, train.dropout: {low: 0.1, high: 0.5, step: 0.1}}")
    grid = space.grid(5)
    assert {values["train.rank"] for values in grid} == {1, 2, 3}
    assert [values["train.dropout"] for values in grid[:5]] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert list(space.iterate_points()) == grid and len(grid) == 15


def test_a_grid_that_no_sweep_could_finish_is_refused_and_not_made() -> None:
    space = space_of(
        "{train.rank: {low: 1, high: 1000, step: 1}, train.alpha: {low: 1, high: 2, step: 0.001},"
        " train.learning_rate: {low: 1, high: 2}}"
    )
    with pytest.raises(SettingsError, match=f"more than {MAX_POINTS:,} points"):
        space.grid(4)


def test_points_of_a_large_space_are_made_one_by_one() -> None:
    steps = "{low: 1, high: 1000000000}"
    space = space_of(f"{{train.rank: {steps}, train.batch_size: {steps}}}")
    assert space.is_finite
    assert [values["train.batch_size"] for values in islice(space.iterate_points(), 3)] == [1, 2, 3]


def test_values_of_another_space_are_known_for_what_they_are() -> None:
    space = space_of(WIDE)
    values = json.loads(json.dumps(space.draw(last)))
    assert is_in_space(space, values)
    assert not is_in_space(space, values | {"train.rank": 65})
    assert not is_in_space(space, values | {"train.alpha": 64})  # does not equal the tie
    assert not is_in_space(space, values | {"train.adapter": "lora"})  # lora has no target rank
    assert not is_in_space(space, {key: value for key, value in values.items() if key != "train.dropout"})
    assert not is_in_space(space, values | {"train.warmup_ratio": 0.1})


def from_table(values: dict[str, Any], dimension: SearchDimension) -> Any:
    return values[dimension.name]


def test_a_pick_outside_is_an_error_and_rounding_is_not() -> None:
    space = space_of("{train.dropout: {low: 0, high: 0.5, step: 0.1}, train.alpha: {low: 0.1, high: 7, log: true}}")
    picks: dict[str, Any] = {"train.dropout": 0.1 + 0.2, "train.alpha": 7.000000000000001}
    assert space.draw(partial(from_table, picks)) == {"train.dropout": 0.3, "train.alpha": 7.0}
    for name, wrong in [("train.dropout", 0.25), ("train.dropout", "0.1"), ("train.alpha", True), ("train.alpha", inf)]:
        with pytest.raises(ValueError, match=f"{name}: .* expected"):
            space.draw(partial(from_table, {**picks, name: wrong}))


def thousandths(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda number: number / 1000)


@st.composite
def spaces(draw: st.DrawFn) -> Settings:
    """Draw settings with a space of ranges, steps, choices, ties and conditions."""
    low = draw(st.integers(1, 20))
    high = draw(st.integers(low, 30))
    shape = draw(st.sampled_from(["", ", log: true", f", step: {draw(st.integers(1, 9))}"]))
    rank = draw(st.sampled_from([f"{{low: {low}, high: {high}{shape}}}", "{choices: [2, 4, 8]}"]))
    parameters = {"train.rank": rank, "train.target_modules": "{choices: [all, [q_proj]]}"}
    rate = draw(st.floats(1e-6, 1e-2)), draw(st.floats(1e-2, 1.0))
    optional = {
        "train.alpha": draw(st.sampled_from(["{tie: rank / 3}", "{tie: rank}", "{choices: [1, 2.5]}"])),
        "train.batch_size": f"{{tie: {draw(st.integers(1, 9))} * rank}}",
        "train.learning_rate": f"{{low: {rate[0]!r}, high: {rate[1]!r}, log: {str(draw(st.booleans())).lower()}}}",
        "train.dropout": f"{{low: {draw(thousandths(0, 300))}, high: 0.9, step: {draw(thousandths(90, 500))}}}",
        "train.adapter": "{choices: [lora, adalora, dora]}",
        "train.adalora.target_rank": "{low: 1, high: 12, when: {adapter: adalora}}",
        "train.warmup_ratio": "{low: 0, high: 0.5, when: {target_modules: [[q_proj]]}}",
        "train.double_quantization": "{choices: [true, false], when: {target_modules: all}}",
    }
    chosen = draw(st.sets(st.sampled_from(sorted(optional))))
    if "train.adapter" not in chosen:
        chosen -= {"train.adalora.target_rank"}
    parameters |= {key: optional[key] for key in draw(st.permutations(sorted(chosen)))}
    return project("{" + ", ".join(f"{key}: {value}" for key, value in parameters.items()) + "}")


@OFTEN
@given(spaces(), st.integers(0, 2**32 - 1))
def test_proposals_of_optuna_are_in_the_space_and_survive_json_and_settings(project: Settings, seed: int) -> None:
    space = SearchSpace.from_settings(project)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    asked = study.ask()

    def pick(dimension: SearchDimension) -> Any:
        return decode_value(dimension, asked._suggest(dimension.name, to_distribution(dimension)))

    values = space.draw(pick)
    kept = json.loads(json.dumps(values))
    assert is_in_space(space, kept)
    assert all(snap_value(space.dimension(name), value) == value for name, value in space.select_drawn(kept).items())
    assert space.draw(partial(from_table, space.select_drawn(kept))) == values
    optuna.trial.create_trial(  # Optuna checks that its distributions can hold these values
        value=0.0,
        params={name: encode_value(value) for name, value in space.select_drawn(kept).items()},
        distributions={name: to_distribution(space.dimension(name)) for name in space.select_drawn(kept)},
    )
    try:
        patched = apply_values(project, kept)
    except SettingsError as error:
        assert "target_rank" in str(error)
        return
    assert apply_values(patched, values) == patched
    for key, value in values.items():
        *sections, leaf = key.removeprefix("train.").split(".")
        node: Any = patched.train
        for name in sections:
            node = getattr(node, name)
        assert getattr(node, leaf) == value
        assert type(getattr(node, leaf)) is type(value)


@OFTEN
@given(spaces(), st.integers(2, 3))
def test_grid_points_are_unique_and_drawable(project: Settings, points: int) -> None:
    space = SearchSpace.from_settings(project)
    grid = space.grid(points)
    assert len({json.dumps(values) for values in grid}) == len(grid) > 0
    for values in random.Random(0).sample(grid, min(20, len(grid))):
        assert is_in_space(space, values)
    if space.is_finite:
        assert list(islice(space.iterate_points(), 5000)) == list(islice(iter(space.grid(60)), 5000))


def test_the_document_says_the_same_of_the_same_space_and_names_what_inactive_knobs_fall_back_to() -> None:
    document = space_of(WIDE, "{adalora: {target_rank: 3}}").document()
    assert json.loads(json.dumps(document)) == document
    assert document["train.adalora.target_rank"] == {
        "low": 2, "high": 8, "log": False, "step": 3, "when": {"train.adapter": ["adalora"]}, "otherwise": 3,
    }  # fmt: skip
    written_otherwise = WIDE.replace("2 * rank", "train.rank*2.0").replace("adapter: adalora", "adapter: [adalora]")
    assert space_of(written_otherwise, "{rank: 5, adalora: {target_rank: 3}}").document() == document


def test_settings_of_a_trial_are_validated_as_a_whole_and_the_message_has_values_and_place() -> None:
    project = Settings()
    assert apply_values(project, {"train.target_modules": ["q_proj"]}).train.target_modules == ("q_proj",)
    with pytest.raises(
        SettingsError, match=r"^train\.adapter adalora, train\.rank 4: train\.adalora\.target_rank: found 8"
    ):
        apply_values(project, {"train.adapter": "adalora", "train.rank": 4})
    with pytest.raises(SettingsError, match=r"train\.rank: found 4.5; expected an integer"):
        apply_values(project, {"train.rank": 4.5})
    for key in ("train.rnk", "train.rank.x", "nothing", "train.gurads.patience"):
        with pytest.raises(SettingsError, match=f"{key}: unknown setting"):
            apply_values(project, {key: 1})


# Values that a person has changed.


def test_changed_values_follow_the_conditions_and_choices_of_the_space() -> None:
    space = make_space(RANK, CONDITIONAL, TARGETS)
    lora = {"train.rank": 8, "train.alpha": 16.0, "train.adapter": "lora", "train.target_modules": "all"}
    changed = space.change_values(lora, {"adapter": "adalora", "adalora.target_rank": 5, "rank": 100})
    assert changed == {
        **lora, "train.rank": 100, "train.alpha": 200.0, "train.adapter": "adalora", "train.adalora.target_rank": 5,
    }  # fmt: skip
    assert not space.contains(changed)
    assert space.change_values(changed, {"adapter": "lora", "rank": 8}) == lora
    assert space.contains(lora)
    listed = space.change_values(lora, {"target_modules": ["q_proj"]})
    assert listed["train.target_modules"] == ("q_proj",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"adapter": "adalora"}, "train.adalora.target_rank: has no value, but applies"),
        (
            {"adalora.target_rank": 3},
            "train.adalora.target_rank: does not apply .*; it applies if train.adapter is adalora",
        ),
        ({"adapter": "dora"}, "train.adapter: found dora; expected lora, adalora"),
        ({"target_modules": ["k_proj"]}, "train.target_modules: found .*k_proj.*; expected all, "),
        ({"rank": True}, "train.rank: found true"),
        ({"dropout": 0}, "train.dropout: found 0; expected a number > 0"),
        ({"machine.threads": 1}, "machine.threads: not a setting of the search space; expected one of: train.rank, "),
    ],
)
def test_changes_that_the_space_cannot_have_are_refused(changes: dict[str, Any], says: str) -> None:
    space = make_space(RANK, CONDITIONAL, TARGETS, {"train.dropout": SweepParameter(low=0.1, high=0.3, log=True)})
    lora = {"train.rank": 8, "train.adapter": "lora", "train.target_modules": "all", "train.dropout": 0.1}
    with pytest.raises(SettingsError, match=says):
        space.change_values(lora, changes)


@pytest.mark.parametrize(
    ("space", "sweep", "says"),
    [
        ("{train.rank: {low: 2, high: 8}}", "{}", "found validation_loss, but the loss of dpo depends on"),
        (
            "{train.beta: {low: 0.1, high: 1}}", "{objectives: [{metric: preference_accuracy}]}",
            "train.beta: trials are pruned by their loss",
        ),
        ("{train.objective: {choices: [dpo, ipo]}}", "{objectives: [{metric: preference_accuracy}]}", "sweep each by"),
    ],
)  # fmt: skip
def test_preference_tunings_are_not_compared_by_losses_of_different_scales(space: str, sweep: str, says: str) -> None:
    settings = params_file.parse(f"train: {{objective: dpo}}\nsweep: {sweep}\n")
    changed = params_file.apply_changes(settings, {"sweep.space": yaml.safe_load(space)})
    with pytest.raises(SettingsError, match=says):
        SearchSpace.from_settings(changed)


def test_beta_can_be_searched_without_pruning() -> None:
    text = "train: {objective: dpo}\nsweep: {objectives: [{metric: preference_accuracy}], pruner: {kind: none}}\n"
    space = {"sweep.space": {"train.beta": {"low": 0.1, "high": 1}}}
    assert SearchSpace.from_settings(params_file.apply_changes(params_file.parse(text), space)).variables
