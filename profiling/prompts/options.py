"""Options that take tasks: their text is read once, and all that is behind them takes a Task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from artifacts.cli.options import Arg
from profiling.prompts.prompt import Task, distinct, parse_task

# Ends the help of an option that takes tasks.
LISTED = "headwise tasks lists them"


def _task(value: Any) -> Any:
    return parse_task(value) if isinstance(value, str) else value


def _checked(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """The tasks as they are, if no two files have one name."""
    distinct(tasks)
    return tasks


def _text(value: Any) -> Any:
    return parse_task(f"text:{value}") if isinstance(value, str) else value


OneTask = Annotated[
    Task,
    BeforeValidator(_task),
    PlainSerializer(str, return_type=str),
    Arg(metavar="TASK"),
]
Tasks = Annotated[
    tuple[OneTask, ...],
    AfterValidator(_checked),
    Arg(flags=("--task",), metavar="TASK", repeat=True),
]
"""--task, repeatable; no two files of one name."""
Text = Annotated[
    Task,
    BeforeValidator(_text),
    PlainSerializer(lambda task: str(task.file), return_type=str),
    Arg(metavar="FILE"),
]
"""The file of a long text, as the task that asks for its windows."""


def words(tasks: Iterable[Task]) -> str:
    """The tasks as they are typed, for a help text."""
    return " ".join(map(str, tasks))
