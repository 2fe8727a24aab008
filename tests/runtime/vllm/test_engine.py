"""The engine of a configuration of vLLM: one for the served model, none for its drafts."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.vllm import engine
from runtime.vllm.options import HASH_KEY


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Return the configurations that an engine was made for, without loading an artifact."""
    made: list[Any] = []

    class FakeEngine(engine.Engine):
        def __init__(self, options: Any, config: Any) -> None:
            made.append(config)
            self._config = lambda: config
            config.additional_config = {**config.additional_config, HASH_KEY: "0123"}

    monkeypatch.setattr(engine, "_latest", None)
    monkeypatch.setattr(engine, "Engine", FakeEngine)
    return made


def configuration(drafts: bool = True) -> Any:
    speculative = SimpleNamespace(num_speculative_tokens=2) if drafts else None
    return SimpleNamespace(
        additional_config={"headwise": "cfg.yaml"}, speculative_config=speculative
    )


def derived(config: Any) -> Any:
    """As vLLM's replace(): another object with the same values."""
    return SimpleNamespace(**vars(config))


def test_draft_configuration_has_no_engine(made):
    config = configuration()
    own = engine.engine_of(config)
    draft = derived(config)
    assert own is not None and engine.makes_drafts(draft) and engine.engine_of(draft) is None
    assert engine.engine_of(config) is own and engine.latest() is own and made == [config]


@pytest.mark.parametrize("drafts", [True, False])
def test_configuration_with_hash_of_another_process_is_served(drafts, made):
    """It was pickled after the first process had added the hash."""
    config = configuration(drafts)
    config.additional_config[HASH_KEY] = "0123"
    assert engine.engine_of(config) is not None
    # Also where this process has served another before, whose configuration is alive.
    copy = pickle.loads(pickle.dumps(config))
    assert not engine.makes_drafts(copy) and engine.engine_of(copy) is not None
    assert made == [config, copy]


def test_derived_configuration_without_drafts_is_served(made):
    config = configuration(drafts=False)
    engine.engine_of(config)
    other = derived(config)
    assert engine.engine_of(other) is not None and made == [config, other]
