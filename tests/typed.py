"""Functions that take tasks, for tests that write them as a user types them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from profiling.prompts import held_out as held
from profiling.prompts import prompt
from profiling.prompts.prompt import Task, parse_task
from search.model.prompts import HeldOut as OfTasks


def _read(task: str | Task) -> Task:
    return parse_task(task) if isinstance(task, str) else task


def _one(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(task: str | Task, *arguments: Any, **options: Any) -> Any:
        return function(_read(task), *arguments, **options)

    return call


def _several(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(tasks: Any, *arguments: Any, **options: Any) -> Any:
        return function(tuple(map(_read, tasks)), *arguments, **options)

    return call


make_prompts = _one(prompt.make_prompts)
per_context = _one(prompt.per_context)
unseen_prompts = _one(held.unseen_prompts)
seeded_prompts = _one(held.seeded_prompts)
fewer_sentences = _several(prompt.fewer_sentences)
held_out = _several(held.held_out)
HeldOut = _several(OfTasks)
