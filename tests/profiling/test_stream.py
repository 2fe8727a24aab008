"""Streams by their definition: in any chunks, after any kill, against plain forwards."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from artifacts import HeadwiseError
from profiling.evaluation.intervals import share_of
from profiling.ledger import Ledger
from profiling.prompts.tokens import Encoder
from profiling.streams import report as stream_report
from profiling.streams import run as stream_run
from profiling.streams.config import Streamed, method_of
from profiling.streams.methods import Stretch
from profiling.streams.report import draw
from profiling.streams.run import run
from profiling.streams.tokens import TokenStream, stream_eval, text_stream
from tests.profiling.tokenizers import MAKERS, byte_level

ALL = ("streaming", "streaming:1", "window-only", "recomputed", "dense", "original")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """config(out, **changes) of a run that draws no picture: one test looks at it."""
    monkeypatch.setattr(stream_run, "draw", lambda *given: [])
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The clerk counted {7 * n % 101} boats." for n in range(60)))

    def config(out="out", **changes):
        given = {"tokens": 130, "sinks": 2, "window": 22, "methods": ALL}
        given |= {"chunk": 32, "block": 32, "stride": 3}
        if changes.get("task") != "stream_eval":
            given["text"] = text
        return Streamed(model="tiny", out=tmp_path / out, dtype="float32", **{**given, **changes})

    return config


def test_chunks_of_any_size_give_what_one_by_one_gives(loaded, config):
    methods = ("streaming", "original")
    alone, chunked = (
        run(config(f"out{chunk}", chunk=chunk, block=40, methods=methods), loaded)[1]["blocks"]
        for chunk in (1, 20)
    )
    assert list(alone) == list(chunked) == list(methods)
    for method in methods:
        assert chunked[method]["end"] == [40, 80, 120, 130]
        np.testing.assert_allclose(chunked[method]["nll"], alone[method]["nll"], rtol=1e-4)
        held = chunked[method]["cache_bytes"]
        assert held == alone[method]["cache_bytes"] and len(set(held)) == 1


def test_methods_are_what_they_are_called(loaded, config):
    """Against plain forwards; before the window is full all methods are dense."""
    given = config(stride=1, block=8, chunk=8, tokens=60)
    rows, record = run(given, loaded)
    found = {row.method: row for row in rows}
    ids = torch.tensor([text_stream(Encoder(loaded.tokenizer), given.text, 60, 1).ids])
    with torch.no_grad():
        whole = cross_entropy(loaded.model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
        windows = [loaded.model(ids[:, max(0, t - 24) : t]).logits[0, -1] for t in range(1, 61)]
        stretches = cross_entropy(torch.stack(windows), ids[0, 1:], reduction="none")
    for method, losses in (("dense", whole), ("recomputed", stretches)):
        assert found[method].perplexity == pytest.approx(losses.mean().exp().item(), rel=1e-4)
    blocks = {method: np.array(values["nll"]) for method, values in record["blocks"].items()}
    for method, values in blocks.items():
        np.testing.assert_allclose(values[:3], blocks["dense"][:3], rtol=1e-4, err_msg=method)
        if method != "dense":
            assert not np.allclose(values[4:], blocks["dense"][4:], rtol=1e-3), method
    expected = (whole - stretches)[24:].mean().exp().item()
    assert found["dense"].ratio == pytest.approx(expected, rel=1e-4)
    assert found["recomputed"].ratio is None and found["streaming"].low is not None


def test_a_window_is_one_sample_of_the_ratio():
    """4 windows of 10 alike tokens are 4 samples, not 40."""
    apart = np.repeat([0.1, 0.3, 0.2, 0.4], 10)
    stream = TokenStream(
        ids=tuple(range(51)), probes=tuple((at, at + 1) for at in range(11, 51)), name="t"
    )
    both = []
    for name, values in (("recomputed", np.zeros(40)), ("streaming", apart)):
        part = Stretch(nll=1.0, tokens=40, probed=values.tolist(), right=[1] * 40)
        both.append(stream_report.Series(method=name, ends=(51,), stretches=(part,)))
    row = stream_report.rows(both, stream, whole=10, task="text")[1]
    # The last token, 50, begins a fifth window; Student's interval of shares says the rest.
    windows = [apart[:9], apart[9:19], apart[19:29], apart[29:39], apart[39:]]
    expected = share_of([float(part.sum()) for part in windows], [len(part) for part in windows])
    assert row.ratio == pytest.approx(np.exp(0.25))
    assert (row.low, row.high) == pytest.approx((np.exp(expected.low), np.exp(expected.high)))
    by_token = 1.96 * float(apart.std(ddof=1)) / 40**0.5
    assert row.low is not None and row.low < np.exp(0.25 - 2 * by_token)
    alone = stream_report.rows(both, stream, whole=10, task="text")[0]
    assert alone.ratio is alone.low is None
    assert stream_report.rows(both, stream, whole=100, task="text")[1].ratio is None


def test_a_killed_run_ends_as_if_it_had_not_been(loaded, config, monkeypatch):
    """Killed after a block was kept, in two methods."""
    methods = ("streaming", "recomputed", "original")
    _, whole = run(config("whole", methods=methods), loaded)
    put = Ledger.put

    for after in (6, 11):

        def once(ledger, unit, value, after=after):
            put(ledger, unit, value)
            if len(ledger) > after:
                raise KeyboardInterrupt

        monkeypatch.setattr(Ledger, "put", once)
        with pytest.raises(KeyboardInterrupt):
            run(config(methods=methods), loaded)
        units = list((config().out / "stream.json.stream.ledger").glob("*.unit"))
        assert len(units) == after + 1
    monkeypatch.setattr(Ledger, "put", put)
    _, record = run(config(methods=methods), loaded)
    for method, blocks in whole["blocks"].items():
        assert record["blocks"][method]["nll"] == blocks["nll"]
    assert [path.name for path in config().out.iterdir()] == ["stream.json"]


def test_another_stream_does_not_go_on(loaded, config):
    given = config()
    given.out.mkdir()
    with Ledger(given.out / "stream.json", "stream", settings={"model": "other"}) as ledger:
        ledger.put(ledger.unit("streaming 0"), 1)
    with pytest.raises(HeadwiseError, match="belongs to another run: its model is 'other'"):
        run(given, loaded)
    run(config(fresh=True, methods=("window-only",)), loaded)


def test_a_short_text_is_begun_again(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("The river and the old clerk.")
    encode = Encoder(byte_level(bos=True))
    ids = encode(text.read_text())
    made = text_stream(encode, text, 3 * len(ids), 1)
    assert made.ids == (*encode.prefix, *(ids * 3)) and made.repeats == 2


@pytest.mark.parametrize("name", ["bytes with bos and eos", "metaspace"])
def test_stream_eval_asks_for_what_was_said_twenty_lines_before(name):
    tokenizer = MAKERS[name]()
    made = stream_eval(Encoder(tokenizer), 6000, seed=3)
    assert made.ids == stream_eval(Encoder(tokenizer), 6000, seed=3).ids[:6001]
    assert made.ids != stream_eval(Encoder(tokenizer), 6000, seed=4).ids
    text = re.sub(r"\n ?\n.*\n\n", "\n", tokenizer.decode(list(made.ids)))
    facts = [line for line in text.splitlines() if "The value of" in line]
    for number, (begin, end) in enumerate(made.probes):
        answer = tokenizer.decode(list(made.ids[begin:end])).strip()
        before = tokenizer.decode(list(made.ids[:begin])).rstrip()
        asked = before.rpartition("The value of ")[2].removesuffix(" is")
        assert facts[9 + 10 * number].strip() == f"The value of {asked} is {answer}."
    assert len(made.probes) >= 3


def test_stream_eval_counts_answers_of_which_every_token_is_the_likeliest(
    loaded, config, monkeypatch
):
    tokens = 3600
    given = config(task="stream_eval", tokens=tokens, block=64, methods=("streaming",))
    rows, record = run(given, loaded)
    assert rows[0].accuracy == record["rows"][0]["accuracy"] == 0.0
    ids = stream_eval(Encoder(loaded.tokenizer), tokens, 0)
    forward = loaded.model.forward

    def knowing(*args, **kwargs):
        out = forward(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            end = kwargs["past_key_values"].get_seq_length()
            n = out.logits.shape[1]
            targets = torch.tensor(ids.ids[end - n + 1 : end + 1])
            out.logits[0, : len(targets)].scatter_(1, targets[:, None], 100.0)
            wrong = ids.probes[1][0]
            if end - n < wrong <= end:
                out.logits[0, wrong - (end - n) - 1] = 0.0
        return out

    monkeypatch.setattr(loaded.model, "forward", knowing)
    rows, _ = run(replace(given, out=given.out.with_name("knowing")), loaded)
    assert len(ids.probes) > 1
    assert rows[0].accuracy == pytest.approx(1 - 1 / len(ids.probes))


@pytest.mark.usefixtures("sketched")
def test_times_are_taken_of_every_bounded_method(loaded, config, monkeypatch):
    monkeypatch.setattr(stream_run, "draw", draw)
    given = config(methods=("streaming", "recomputed", "dense"), timed=2, command="as typed")
    run(given, loaded)
    record = json.loads((given.out / "stream.json").read_text())
    assert list(record["timed"]) == ["streaming", "recomputed"]
    assert all(len(seconds) == 5 and min(seconds) > 0 for seconds in record["timed"].values())
    assert record["command"] == "as typed" and record["environment"]["torch"] == torch.__version__
    # Five blocks of each method.
    assert len((given.out / "stream.csv").read_text().splitlines()) == 1 + 3 * 5
    assert (given.out / "stream.png").is_file() and (given.out / "stream.svg").is_file()


def test_one_sink_in_as_many_tokens():
    method = method_of("streaming:1", sinks=4, window=1020)
    assert method.policy is not None and (method.policy.sinks, method.policy.window) == (1, 1023)
    only = method_of("window-only", sinks=4, window=1020).policy
    assert only is not None and (only.sinks, only.window) == (0, 1024)
