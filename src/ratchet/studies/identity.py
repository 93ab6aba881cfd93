"""What a study is: all that must not change between two starts of it, and what has changed where it did."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ratchet import digest
from ratchet.config import Settings
from ratchet.records_held_out import ANSWERED
from ratchet.run.directory import RECIPE_VERSION
from ratchet.studies.space import Space

FORMAT = 1

ABSENT = object()

_DIGEST = re.compile(r"[0-9a-f]{40,}")


def identity(settings: Settings, data_digest: str, base_digest: str) -> dict[str, Any]:
    """What makes trials comparable and their sequence the same, as JSON.

    Not in it: how long the search goes on (trials, hours, tokens, stop_after), what is done with the best (finalists),
    where and under which name. Of searched settings only the values that trials leave as they are in params.yaml.

    Raises:
        SettingsError: the search space makes no sense.
    """
    space, sweep = Space.of(settings), settings.sweep
    train = settings.train.identity()
    for axis in space.axes():
        _, *sections, leaf = axis.knob.split(".")
        node = train
        for name in sections:
            node = node[name]
        del node[leaf]
    answered = any(aim.metric in ANSWERED for aim in sweep.objectives)
    answers = {"max_new_tokens": settings.evaluate.max_new_tokens} if answered else {}
    return answers | {
        "format": FORMAT,
        "space": _canonical(space.document()),
        "objectives": [[aim.metric, aim.better] for aim in sweep.objectives],
        "sampler": _canonical(sweep.sampler.model_dump(mode="json")),
        "pruner": _canonical(sweep.pruner.model_dump(mode="json")),
        "train": _canonical(train),
        "data": data_digest,
        "base": base_digest,
        "recipe": RECIPE_VERSION,
        "rows": sweep.rows,
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each dotted key that differs, such as `space.train.rank.high: 64 -> 128`, sorted."""
    return sorted(_differing(_canonical(old), _canonical(new), ""))


def _differing(old: Any, new: Any, key: str) -> Iterator[str]:
    if _same(old, new):
        return
    nodes = [node for node in (old, new) if node is not ABSENT]
    if all(isinstance(node, dict) for node in nodes) and any(nodes):
        before, after = (node if isinstance(node, dict) else {} for node in (old, new))
        for name in dict.fromkeys((*before, *after)):
            path = f"{key}.{name}" if key else str(name)
            yield from _differing(before.get(name, ABSENT), after.get(name, ABSENT), path)
    else:
        yield f"{key}: {_shown(old)} -> {_shown(new)}"


def _same(old: Any, new: Any) -> bool:
    if ABSENT in (old, new):
        return old is new
    return digest.canonical_json(old) == digest.canonical_json(new)  # true is not 1


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "(none)"
    if isinstance(value, str):
        return value[: digest.SHORT] if _DIGEST.fullmatch(value) else value
    return json.dumps(value, ensure_ascii=False)


def _canonical(value: Any) -> Any:
    """The same JSON for the same meaning: whole numbers without a point, for defaults have none and files may."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
