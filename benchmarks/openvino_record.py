"""The result file of openvino.py: saved measurement by measurement, compared and printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from result import Result, labeled, read, write

from artifacts import HeadwiseError
from artifacts.errors import one_line
from artifacts.files import check_writable
from artifacts.page.layout import aligned
from profiling.evaluation.intervals import share_of
from profiling.speed.baselines import HEADWISE, KERNEL, LABELS, MODEL, Speedup, speedup

OPENVINO = "openvino"
XATTENTION = "xattention"
# Dense baselines: a speed-up is over the fastest.
DENSE = (MODEL, KERNEL, OPENVINO)
# Losses are against these, where they were measured.
_BASELINES = (*DENSE, HEADWISE)
_LABELS = {**LABELS, OPENVINO: "OpenVINO GenAI, dense"}
# Dense attention of two engines in half precision differs by 0.05 at most.
_AGREEMENT = 0.2
_DIGITS = 4

LogP = Sequence[float | None]
"""Of each answer the least log p of its tokens, given the right ones before it; None where the
engine chose another token, whose p cannot be above 0.5 then."""


def is_right(log_p: float | None) -> bool:
    """True if each token of an answer has p > 0.5: then the greedy answer is this one."""
    return log_p is not None and log_p > math.log(0.5)


def own_dense(method: str, measured: Container[str]) -> str:
    """The dense attention of the engine that a method runs in, of those that were measured."""
    if method == OPENVINO or method.startswith(XATTENTION):
        return OPENVINO
    if MODEL in measured:
        return MODEL
    return KERNEL


def label(method: str) -> str:
    """A method's name in the table."""
    if method.startswith(XATTENTION):
        return f"OpenVINO GenAI, XAttention {method.removeprefix(XATTENTION + '_')}"
    if method.startswith(HEADWISE + "@"):
        return f"Headwise, {method.removeprefix(HEADWISE + '@')}"
    return _LABELS.get(method, method)


class Record:
    """Measurements of prompts by methods, in a file that is complete after each of them.

    Attributes:
        prompts: of each prompt by its digest: its task, tokens and answers, and by method `log_p`
            (see LogP) and `seconds` to the first token.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], artifacts: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Take the measurements of a file, if there is one.

        Args:
            path: the file.
            header: what, command, commit, machine, versions, model, tokens and settings.
            artifacts: by method its name, content_sha256 and counts of heads.

        Raises:
            HeadwiseError: the file has other settings, is no such file, or cannot be written.
        """
        check_writable(path)
        self.prompts: dict[str, dict[str, Any]] = {}
        self._path = path
        self._header = dict(header)
        self._artifacts = dict(artifacts)
        self._machine: str | None = None
        if path.exists():
            self._resume()

    def _resume(self) -> None:
        shown = one_line(str(self._path))
        try:
            stored = read(self._path)
            self.prompts = {each["digest"]: each for each in map(_bare, stored.part("prompt"))}
            artifacts = {each["method"]: each for each in stored.part("artifact")}
            artifacts = {name: _bare(each, "method") for name, each in artifacts.items()}
            (settings,) = map(_bare, stored.part("settings"))
            known = {**settings, **stored.versions}
            served = {name: each["content_sha256"] for name, each in artifacts.items()}
            times = any(prompt["seconds"] for prompt in self.prompts.values())
        except (HeadwiseError, ValueError, KeyError):
            raise HeadwiseError(
                f"{shown} is no result file of this script: choose another --out"
            ) from None
        now = {**self._settings(), **self._header["versions"]}
        # A file may get further artifacts, but those that it has must be the same.
        for name in served.keys() & self._artifacts.keys():
            known[f"artifact {name}"] = served[name]
            now[f"artifact {name}"] = self._artifacts[name]["content_sha256"]
        for name, value in now.items():
            if known.get(name) != value:
                raise HeadwiseError(
                    f"{shown} has another {name}: {known.get(name)}, now {value}; "
                    "choose another --out"
                )
        self._artifacts = {**artifacts, **self._artifacts}
        if times:
            self._machine = stored.machine

    def add(self, digest: str, prompt: Mapping[str, Any]) -> None:
        """Add a prompt, unless the file has it."""
        if digest not in self.prompts:
            self.prompts[digest] = {"digest": digest, **prompt, "seconds": {}, "log_p": {}}

    def check_machine(self) -> None:
        """Raise HeadwiseError where the file has times of another machine."""
        machine = self._header["machine"]
        if self._machine not in (None, machine):
            raise HeadwiseError(
                f"{one_line(str(self._path))} has times of another machine: {self._machine}, now "
                f"{machine}; choose another --out, or --timed 0"
            )
        self._machine = machine

    def put_log_p(self, digest: str, method: str, value: LogP) -> None:
        """Keep the answers of a method, and save the file.

        Raises:
            HeadwiseError: the engines' dense attentions do not agree; nothing is saved.
        """
        prompt = self.prompts[digest]
        check_agreement({**prompt["log_p"], method: value}, prompt["task"])
        prompt["log_p"][method] = value
        write(self._path, self.result())

    def put_turn(self, digest: str, seconds: Mapping[str, float]) -> None:
        """Keep the seconds of a turn over all methods, in place of earlier ones; save the file."""
        self.prompts[digest]["seconds"] = dict(seconds)
        write(self._path, self.result())

    def _settings(self) -> dict[str, Any]:
        """Settings that all measurements of a file share, apart from the versions."""
        common = {name: self._header[name] for name in ("model", "tokens")}
        return {**common, **self._header["settings"]}

    def rows(self) -> list[dict[str, Any]]:
        """The row of each method, as `rows_of` has it."""
        return rows_of(list(self.prompts.values()))

    def result(self) -> Result:
        """The file: settings, artifacts, figures and losses of the methods by task, prompts."""
        artifacts = [{"method": name, **each} for name, each in self._artifacts.items()]
        methods, losses = by_task(self.rows())
        return Result(
            **{name: self._header[name] for name in ("what", "command", "commit", "versions")},
            machine=self._machine or self._header["machine"],
            rows=labeled("settings", [self._settings()])
            + labeled("artifact", artifacts)
            + labeled("method", methods)
            + labeled("loss", losses)
            + labeled("prompt", self.prompts.values()),
        )


def _bare(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A row of a file without its part and these fields."""
    return {name: value for name, value in row.items() if name not in ("part", *names)}


def by_task(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row of figures for each method and task, "all" for all of them, and one for each loss."""
    methods: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    for row in rows:
        pooled = {name: value for name, value in row.items() if name != "tasks"}
        for task, figures in {"all": pooled, **row["tasks"]}.items():
            own = {"method": row["method"], "task": task}
            methods.append(own | {name: figures[name] for name in figures if name != "lost"})
            losses += [
                {**own, "baseline": baseline, **loss}
                for baseline, loss in figures["lost"].items()
                if loss is not None
            ]
    return methods, losses


def check_agreement(log_p: Mapping[str, LogP], task: str) -> None:
    """Raise HeadwiseError where the dense attentions of both engines differ beyond rounding."""
    own = own_dense(MODEL, log_p)
    if own not in log_p or OPENVINO not in log_p:
        return
    pairs = zip(log_p[own], log_p[OPENVINO], strict=True)
    both = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    if both and (median := statistics.median(both)) > _AGREEMENT:
        raise HeadwiseError(
            f"{task}: log p of answers differs by {median:.2f} (median) between the dense "
            f"attention of OpenVINO and of torch, where {_AGREEMENT} is allowed: the export or the "
            "engine is at fault"
        )


def lost(
    prompts: Iterable[Mapping[str, Any]], method: str, baseline: str
) -> dict[str, float | int | None] | None:
    """Correct answers that are lost, as a fraction of a baseline's, paired by prompt.

    Args:
        prompts: as Record.prompts has them; those without one of both are left out.
        method, baseline: names of methods.

    Returns:
        The value, its 95% interval (None where one prompt has all correct answers of the baseline)
        and the prompts; None without any.
    """
    pairs = [
        (_correct(prompt, baseline), _correct(prompt, method))
        for prompt in prompts
        if method in prompt["log_p"] and baseline in prompt["log_p"]
    ]
    if not pairs:
        return None
    interval = share_of([base - own for base, own in pairs], [base for base, _ in pairs])
    low = high = None
    if interval.is_known:
        low = round(interval.low, _DIGITS)
        high = round(min(interval.high, 1.0), _DIGITS)
    value = round(interval.value, _DIGITS)
    return {"value": value, "low": low, "high": high, "prompts": interval.count}


def _correct(prompt: Mapping[str, Any], method: str) -> int:
    return sum(map(is_right, prompt["log_p"][method]))


def rows_of(prompts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each method: seconds, speed-ups, correct answers and losses, by task and pooled.

    Seconds are of the prompts that all timed methods were timed on.
    """
    methods = dict.fromkeys(
        name for prompt in prompts for kind in ("log_p", "seconds") for name in prompt[kind]
    )
    tasks = dict.fromkeys(prompt["task"] for prompt in prompts)
    timed = {name for prompt in prompts for name in prompt["seconds"]}
    prompts = [
        prompt if timed <= prompt["seconds"].keys() else {**prompt, "seconds": {}}
        for prompt in prompts
    ]
    rows = []
    for method in sorted(methods, key=_place):
        by_task = {}
        for task in tasks:
            own = [prompt for prompt in prompts if prompt["task"] == task]
            if any(method in {**prompt["log_p"], **prompt["seconds"]} for prompt in own):
                by_task[task] = _figures(own, method)
        row = {"method": method, **_figures(prompts, method)}
        rows.append({**row, "over": _over(prompts, method), "tasks": by_task})
    return rows


def _place(method: str) -> tuple[int, str]:
    """Order of the rows: dense attentions, Headwise, further artifacts, XAttention."""
    if method in DENSE:
        return DENSE.index(method), ""
    if method == HEADWISE or method.startswith(HEADWISE + "@"):
        return len(DENSE), method
    return len(DENSE) + 1 + method.startswith(XATTENTION), method


def _figures(prompts: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """Figures of a method on some prompts, with their spread from prompt to prompt."""
    seconds = [prompt["seconds"][method] for prompt in prompts if method in prompt["seconds"]]
    served = [prompt for prompt in prompts if method in prompt["log_p"]]
    each = []
    for prompt in served:
        own = own_dense(method, prompt["log_p"])
        # Without a correct answer of dense attention there is none to lose.
        if own in prompt["log_p"] and (least := _correct(prompt, own)):
            each.append((least - _correct(prompt, method)) / least)
    return {
        "seconds": _spread(seconds),
        "correct": sum(_correct(prompt, method) for prompt in served),
        "answers": sum(len(prompt["log_p"][method]) for prompt in served),
        "prompts": len(served),
        "lost": {
            name: lost(prompts, method, name)
            for name in _BASELINES
            if name != method and any(name in prompt["log_p"] for prompt in served)
        },
        "lost_by_prompt": _spread(each),
    }


def _spread(values: Sequence[Any]) -> dict[str, float] | None:
    if not values:
        return None
    names = ("min", "median", "max")
    three = (min(values), statistics.median(values), max(values))
    return {name: round(value, _DIGITS) for name, value in zip(names, three, strict=True)}


def _over(prompts: Sequence[Mapping[str, Any]], method: str) -> dict[str, float]:
    """Speed-up over each dense attention: the median of the ratios by prompt."""
    over = {}
    for name in DENSE:
        both = [p["seconds"] for p in prompts if {name, method} <= p["seconds"].keys()]
        if both:
            these = [seconds[method] for seconds in both]
            ratio = speedup(these, {name: [seconds[name] for seconds in both]}).value
            over[name] = round(ratio, _DIGITS)
    return over


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [
        ["", "first token s", "x fastest dense", "correct", "lost, of own dense", "of Headwise's"]
    ]
    for row in rows:
        seconds = speed = "-"
        if row["seconds"]:
            seconds = f"{row['seconds']['median']:.3f}"
        if row["over"]:
            speed = f"{Speedup(over=row['over']).value:.2f}x"
        own = own_dense(row["method"], {row["method"], *row["lost"]})
        losses = [row["lost"].get(name) for name in (own, HEADWISE)]
        correct = f"{row['correct']} of {row['answers']}"
        lines.append([label(row["method"]), seconds, speed, correct, *map(_percent, losses)])
    return "\n".join(aligned(lines))


def _percent(loss: Mapping[str, Any] | None) -> str:
    if loss is None:
        return "-"
    if loss["low"] is None:
        return f"{100 * loss['value']:.1f}%"
    return f"{100 * loss['value']:.1f}% ({100 * loss['low']:.1f} to {100 * loss['high']:.1f})"
