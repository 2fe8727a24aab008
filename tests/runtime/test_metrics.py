"""Prometheus' text: every line as the format has it, counters that only rise, labels that hold anything."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
SAMPLE = re.compile(rf"({NAME})\{{(.*)\}} (\S+)")
TYPES = {"counter": ("",), "gauge": ("",), "summary": ("_sum", "_count")}


class Family(NamedTuple):
    kind: str
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> dict[str, Family]:
    """The families of a text in format 0.0.4; fails on anything that the format does not have or says twice."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    helped: list[str] = []
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            match = re.fullmatch(rf"# HELP ({NAME}) (?:[^\\\n]|\\\\|\\n)+", line)
            assert match and match[1] not in helped, line
            helped.append(match[1])
            continue
        if line.startswith("# TYPE "):
            match = re.fullmatch(rf"# TYPE ({NAME}) (\w+)", line)
            assert match and match[2] in TYPES and match[1] == helped[-1] and match[1] not in families, line
            families[match[1]] = Family(match[2], {})
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        family = families[helped[-1]]
        assert name.removeprefix(helped[-1]) in TYPES[family.kind], line
        pairs, at = [], 0
        while at < len(labels):
            pair = LABEL.match(labels, at)
            assert pair, line
            pairs.append((pair[1], re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], pair[2])))
            at = pair.end()
            assert at == len(labels) or labels[at] == ",", line
            at += 1
        assert len({key for key, _ in pairs}) == len(pairs), line
        place = (name, frozenset(pairs))
        assert place not in family.samples, line
        family.samples[place] = float(value)
    assert list(families) == helped
    return families


def test_text_is_valid_and_says_what_stats_say(build, apply, ids) -> None:
    model = build()
    with apply(model, watch=True, min_recall=0.99) as handle:
        model(ids(50))
        model(ids(200))
        stats, families = handle.stats(), parse(handle.prometheus(model="m"))
    calls = families["headwise_calls_total"]
    by_layer = {"model": "m", "layer": "1", "served": "dense", "reason": "short"}
    assert calls.kind == "counter"
    assert calls.samples["headwise_calls_total", frozenset(by_layer.items())] == 1
    assert sum(calls.samples.values()) == 4
    for number, layer in stats["layers"].items():
        for head in range(4):
            at = frozenset({"model": "m", "layer": str(number), "head": str(head)}.items())
            for name in ("density", "recall"):
                samples = families[f"headwise_{name}"].samples
                assert samples[f"headwise_{name}_count", at] == 1
                assert samples[f"headwise_{name}_sum", at] == pytest.approx(layer[name][head])
            lowest = families["headwise_recall_lowest"].samples["headwise_recall_lowest", at]
            assert lowest == pytest.approx(layer["lowest_recall"][head])
            fallbacks = families["headwise_fallbacks_total"].samples["headwise_fallbacks_total", at]
            assert fallbacks == layer["fallbacks"][head]
    assert len(families["headwise_seconds_total"].samples) == 2 * 3


def test_counters_never_fall(build, apply, ids) -> None:
    model = build()
    with apply(model, watch=True) as handle:
        former: dict[str, Family] = {}
        for length in (50, 200, 300, 10):
            model(ids(length))
            families = parse(handle.prometheus())
            for name, family in former.items():
                if family.kind != "gauge":
                    for place, value in family.samples.items():
                        assert families[name].samples[place] >= value
            former = families


def test_without_watching_there_are_calls_alone(build, apply, ids) -> None:
    model = build()
    with apply(model) as handle:
        assert parse(handle.prometheus()) == {"headwise_calls_total": Family("counter", {})}
        model(ids(200))
        families = parse(handle.prometheus())
    assert set(families) == {"headwise_calls_total"}
    labels = {("model", "tiny"), ("layer", "0"), ("served", "sparse"), ("reason", "")}
    assert families["headwise_calls_total"].samples["headwise_calls_total", frozenset(labels)] == 1


def test_labels_hold_anything(build, apply, ids) -> None:
    model = build()
    name = 'a "model"\\of\nmine, {really="yes"} \\n'
    with apply(model) as handle:
        model(ids(200))
        families = parse(handle.prometheus(model=name))
    assert {dict(place[1])["model"] for place in families["headwise_calls_total"].samples} == {name}


@pytest.mark.parametrize(
    "text",
    [
        "headwise 1\n",
        "# HELP a b\n# TYPE a counter\na{} 1",
        '# HELP a b\n# TYPE a counter\na{x="1",x="2"} 1\n',
        '# HELP a b\n# TYPE a counter\na{x="1"} 1\na{x="1"} 2\n',
        '# HELP a b\n# TYPE a counter\na{x="""} 1\n',
        '# HELP a b\n# TYPE a counter\na_sum{x="1"} 1\n',
    ],
)
def test_the_parser_is_strict(text: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        parse(text)
