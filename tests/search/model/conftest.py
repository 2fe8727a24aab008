"""A search of a tiny model as its users run it, and a made-up clock."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import artifacts
from headwise.__main__ import main
from profiling.ledger import Ledger
from profiling.speed.baselines import HEADWISE
from profiling.speed.layer_times import ANCHOR, SDPA

LENGTH = 512


TASKS = ("passkey", "prose")


LIMITS = ("max_kl", "max_perplexity", "max_nll")


# A search with questions proves nothing of a random model, which answers none, whatever the limit.
UNPROVEN = 3


def options(model: Path, at: Path, *more: str, **changes: str | None) -> list[str]:
    values = {
        "model": str(model),
        "out": str(at),
        "length": str(LENGTH),
        "task": " ".join(TASKS),
        "budget": "0.65",
        "cost": "flops",
        "dtype": "float32",
        # A random model has no head that can do without much.
        **dict.fromkeys(LIMITS, "9"),
        "max_lost": "1",
        **changes,
    }
    words = ["--no-picture", *more]
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "task":
            words += [word for task in value.split() for word in (flag, task)]
        elif value is not None:
            words += [flag, *value.split()]
    return words


def content(path: Path) -> str | None:
    return artifacts.load(path).content_sha256


def ledger_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.heads.ledger")


def last_block(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of the report from the verdict on."""
    return capsys.readouterr().out.split("\n\n")[-1].splitlines()


def interrupted(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def found(tiny_model, tmp_path_factory):
    """Read-only artifact of a search; its resume file, report and study are next to its folder."""
    folder = tmp_path_factory.mktemp("found")
    out = folder / "out" / "cfg.yaml"
    out.parent.mkdir()
    remove = Ledger.remove

    def kept(ledger: Ledger) -> None:
        shutil.copytree(ledger.folder, folder / "jobs")
        remove(ledger)

    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setattr(Ledger, "remove", kept)
        storage = f"sqlite:///{folder}/study.db"
        assert main(["search", *options(tiny_model, out, storage=storage)]) == UNPROVEN
    (folder / "report.txt").write_text(output.getvalue())
    return out


# A search that takes less, for those that are to find the same again.
SMALL: dict[str, str | None] = {"task": "passkey"}


@pytest.fixture(scope="session")
def small(tiny_model, tmp_path_factory):
    """The artifact of a small search; not to be written to."""
    out = tmp_path_factory.mktemp("small") / "cfg.yaml"
    assert main(["search", *options(tiny_model, out, **SMALL)]) == UNPROVEN
    return out


@pytest.fixture
def out(found, tmp_path):
    """Output file of a search that resumes from the jobs that `found` finished."""
    out = tmp_path / "cfg.yaml"
    shutil.copytree(found.parents[1] / "jobs", ledger_of(out))
    return out


@dataclass
class Clock:
    """A made-up clock: every first run is real, and takes as long as this says.

    Candidates take 0.1 ms, and a dense prefill twice as long as another.

    Attributes:
        dense: attention of a layer over every key.
        sparse: by the patterns that were accepted.
        sdpa: by torch, relative to dense.
        attention: timed calls, as (tokens, names, whether one turn is not counted).
        prefills: the ways of each round.
    """

    dense: float = 1e-3
    sparse: float = 1e-4
    sdpa: float = 1.0
    attention: list[tuple[int, list[str], bool]] = field(default_factory=list)
    prefills: list[list[str]] = field(default_factory=list)

    def time_calls(
        self, runs: Mapping[str, Callable[[], Any]], *, warm_up: bool, **_: Any
    ) -> dict[str, list[float]]:
        (tokens,) = {run().shape[2] for run in runs.values()}
        self.attention.append((tokens, list(runs), warm_up))
        is_dense = {name: name in (ANCHOR, SDPA) or name.startswith("Dense") for name in runs}
        candidates = {name: [self.dense if is_dense[name] else 1e-4] for name in runs}
        if SDPA in candidates:
            candidates[SDPA] = [self.dense * self.sdpa]
        return candidates | ({"chosen": [self.sparse]} if "chosen" in runs else {})

    def time_prefills(self, runs: Any, *, contexts: Any, **_: Any) -> dict[str, list[float]]:
        if not self.prefills:
            for name, run in runs.items():
                with contexts[name]():
                    run()
        self.prefills.append(list(runs))
        return {name: [1.0 if name == HEADWISE else 2.0] for name in runs}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("profiling.speed.layer_times.time_calls", self.time_calls)
        patch.setattr("search.model.speed.time_calls", self.time_prefills)
        # As many rounds as there may be, however quick the search was.
        patch.setattr("search.model.speed._SHARE", 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    clock.install(monkeypatch)
    return clock


# By such a clock an allocation takes as long whatever it computes, so that cheap ones look dear.
# Of text alone a search may be proven, so that speed decides.
TIMED: dict[str, str | None] = {"cost": "seconds", "budget": "0.7", "task": "prose"}
