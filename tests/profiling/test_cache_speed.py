"""python -m profiling.cache_speed: what it reports, on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import artifacts
from artifacts import HeadwiseError
from profiling import cache_speed
from profiling.cache_speed import CacheSpeed
from profiling.caches.policies import parse_policy
from profiling.models.loading import LoadedModel
from tests.profiling.conftest import tiny


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(model=tiny("llama"), tokenizer=None, name="tiny", revision=None)
    monkeypatch.setattr(cache_speed, "load_model", lambda *args, **kwargs: loaded)


def test_bytes_and_batches_are_those_of_the_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    argv = ["--model", "tiny", "--policy", "streaming:sinks=4,window=60", "--context", "512", "--steps", "2"]
    cache_speed.main([*argv, "--repeats", "1", "--memory", "1MiB", "--json", str(out)])
    sdpa, full, stream = json.loads(out.read_text())["rows"]
    # Keys and values of 3 layers, 2 KV heads of 16 numbers each, in fp32.
    token = 3 * 2 * 2 * 16 * 4
    assert 512 * token <= full["bytes"] <= 1.6 * 512 * token and sdpa["bytes"] == full["bytes"]
    assert 64 * token <= stream["bytes"] <= 1.1 * 64 * token
    assert full["batch"] == 2**20 // full["bytes"] and stream["batch"] == 2**20 // stream["bytes"]
    assert full["token_seconds"] > 0 and stream["batch_tokens_a_second"] > 0
    assert "of full" in capsys.readouterr().out


def test_policies_are_read() -> None:
    assert parse_policy("h2o") == artifacts.H2O()
    assert parse_policy("h2o:heavy=400,recent=0.1,normalised=true") == artifacts.H2O(
        heavy=400, recent=0.1, normalised=True
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h3o", "unknown policy 'h3o'; known: full, streaming, h2o, snapkv"),
        ("h2o:heavy", "'heavy' must be FIELD=VALUE"),
        ("h2o:heavi=1", "heavi: Extra inputs are not permitted"),
        ("streaming:window=0", "window: Input should be greater than or equal to 1"),
    ],
)
def test_policies_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(HeadwiseError, match=said):
        parse_policy(text)


def test_a_memory_too_small_for_one_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="--memory 1000 is too small for one sequence of 300 tokens under full"):
        cache_speed.run(CacheSpeed(model="tiny", policies=("h2o",), contexts=(300,), memory=1000, steps=1, repeats=1))
