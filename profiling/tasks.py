"""headwise tasks: the tasks that prompts can be made of, and a prompt of one of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from artifacts import HeadwiseError
from artifacts.cli import arguments
from artifacts.cli.command import ArgumentParser, run_command
from artifacts.cli.options import add_arguments, at_least, check_ranges, config_of, option, shared
from profiling.prompts.kind import TaskSpec
from profiling.prompts.prompt import KINDS, Prompt, make_prompts, parse_task

_MARK = "\n... {} tokens ...\n"


@dataclass(frozen=True, kw_only=True)
class TaskPrompts:
    """The prompts to show; without a task the command lists all tasks."""

    task: str | None = shared(
        arguments.add_task,
        "make prompts of this task, such as passkey@depth=0.5",
        several=False,
        default=None,
    )
    model: str = shared(
        arguments.add_model,
        "whose tokenizer to use (default smollm2)",
        required=False,
        default="smollm2",
    )
    length: int = shared(
        arguments.add_length,
        "tokens of a prompt (default %(default)s)",
        default=1024,
        within=at_least(1),
    )
    samples: int = option("how many prompts", default=1, within=at_least(1))
    seed: int = shared(arguments.add_seed, default=0)
    markdown: bool = option(
        "list the tasks as the tables of docs/tasks.md", default=False, action="store_true"
    )
    ends: bool = option(
        "show the start and the end of a prompt only",
        default=False,
        action="store_true",
    )

    def __post_init__(self) -> None:
        check_ranges(self)


def listing() -> str:
    """List every task: spelling, question, metric, source and parameters."""
    return "\n\n".join(_described(kind) for kind in KINDS.values())


def markdown_tables() -> str:
    """List the tasks and their parameters as tables in Markdown."""
    lines = ["| task | what it asks | how it is scored | source |", "|---|---|---|---|"]
    lines += [f"| `{k.usage}` | {k.asks} | {k.scored} | {k.source} |" for k in KINDS.values()]
    lines += ["", "| parameter | of | meaning |", "|---|---|---|"]
    names: dict[tuple[str, str], list[str]] = {}
    for kind in KINDS.values():
        for parameter in kind.parameters:
            names.setdefault((parameter.name, parameter.says), []).append(f"`{kind.name}`")
    for (name, says), kinds in names.items():
        lines.append(f"| `{name}` | {', '.join(kinds)} | {says} |")
    return "\n".join(lines)


def shown(prompt: Prompt, tokenizer: Any, *, whole: bool = True) -> str:
    """Show a prompt as text with its answer and finds; of a long one only both ends."""
    ids = prompt.input_ids
    if whole:
        end = len(ids)
    else:
        end = min(200, len(ids) // 2)
    text = tokenizer.decode(ids[:end])
    if end < len(ids):
        text += _MARK.format(len(ids) - 2 * end) + tokenizer.decode(ids[-end:])
    if prompt.answer is None:
        answer = "unknown"
    else:
        answer = prompt.answer
    lines = [
        text,
        "",
        f"tokens: {len(ids)}",
        f"answer: {answer}",
    ]
    if prompt.answer is not None:
        lines.append(f"metric: {prompt.metric}")
    if prompt.references[1:]:
        lines.append(f"references: {' | '.join(prompt.references)}")
    if prompt.turn:
        lines.append(f"later turn: the last {prompt.turn} tokens")
    for start, stop in prompt.scored:
        lines.append(
            f"answer inside: {start} to {stop}, {tokenizer.decode(ids[start:stop]).strip()}"
        )
    for find in prompt.finds:
        start, stop = find.span
        block = tokenizer.decode(ids[start:stop]).strip()
        lines.append(f"found at: {start} to {stop}, depth {start / len(ids):.2f}: {block}")
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of headwise tasks."""
    p = ArgumentParser(prog="headwise tasks", description=__doc__)
    add_arguments(p, TaskPrompts)
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    config = config_of(TaskPrompts, vars(parser().parse_args(argv)))
    if config.task is None:
        if config.markdown:
            print(markdown_tables())
            return 0
        if argv or (argv is None and sys.argv[1:]):
            raise HeadwiseError("say which task to show: --task TASK")
        print(listing())
        return 0
    task = parse_task(config.task)
    from profiling.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    prompts = make_prompts(
        task, tokenizer, length=config.length, samples=config.samples, seed=config.seed
    )
    print("\n\n".join(shown(prompt, tokenizer, whole=not config.ends) for prompt in prompts))
    return 0


def _described(kind: TaskSpec) -> str:
    lines = [
        kind.usage,
        f"    asks: {kind.asks}",
        f"    scored: {kind.scored}",
        f"    from: {kind.source}",
    ]
    lines += [f"    {parameter.name}: {parameter.says}" for parameter in kind.parameters]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
