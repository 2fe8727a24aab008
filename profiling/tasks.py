"""headwise tasks: the tasks that prompts can be made of, and a prompt of one of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from artifacts import HeadwiseError
from artifacts.cli.arguments import Length, ModelName, Seed
from artifacts.cli.options import Arg, CommandConfig
from profiling.progress import announce
from profiling.prompts.kind import TaskSpec
from profiling.prompts.options import OneTask
from profiling.prompts.prompt import KINDS, Prompt, fewer_sentences, make_prompts

_MARK = "\n... {} tokens ...\n"


class Config(CommandConfig):
    """The prompts to show; without a task the command lists all tasks."""

    task: Annotated[OneTask | None, Arg("make prompts of this task, such as passkey@depth=0.5")] = (
        None
    )
    model: Annotated[ModelName, Arg("whose tokenizer to use (default smollm2)")] = "smollm2"
    length: Annotated[Length, Arg("tokens of a prompt (default 1024)"), Field(ge=1)] = 1024
    samples: Annotated[int, Arg("how many prompts"), Field(ge=1)] = 1
    seed: Seed = 0
    markdown: Annotated[bool, Arg("list the tasks as the tables of docs/tasks.md")] = False
    ends: Annotated[bool, Arg("show the start and the end of a prompt only")] = False


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
    """Show a prompt as text with its answer and evidence spans; of a long one only both ends."""
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
    for part in prompt.evidence:
        start, stop = part.span
        block = tokenizer.decode(ids[start:stop]).strip()
        lines.append(f"found at: {start} to {stop}, depth {start / len(ids):.2f}: {block}")
    return "\n".join(lines)


def run(config: Config) -> int:
    """List the tasks, or print prompts of one."""
    if config.task is None:
        if config.markdown:
            print(markdown_tables())
            return 0
        if config.model_fields_set:
            raise HeadwiseError("say which task to show: --task TASK")
        print(listing())
        return 0
    task = config.task
    from profiling.models.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    prompts = make_prompts(
        task, tokenizer, length=config.length, samples=config.samples, seed=config.seed
    )
    print("\n\n".join(shown(prompt, tokenizer, whole=not config.ends) for prompt in prompts))
    for line in fewer_sentences([task], prompts, length=config.length, samples=config.samples):
        announce(line)
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
