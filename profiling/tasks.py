"""headwise tasks: the tasks that prompts can be made of, and prompts of one of them to look at."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError, arguments
from artifacts.command_line import ArgumentParser, run_command
from profiling.prompts.kind import Kind
from profiling.prompts.prompt import KINDS, Prompt, Task, make_prompts, parse_task

_MARK = "\n... {} tokens ...\n"


def listing() -> str:
    """Every task: how it is written, what it asks, how answers are scored, where it is from, what it can be told."""
    return "\n\n".join(_described(kind) for kind in KINDS.values())


def shown(prompt: Prompt, tokenizer: Any, *, whole: bool = True) -> str:
    """A prompt as text with what is known of its answer; of a long one only both ends and what is to be found."""
    ids = prompt.input_ids
    end = len(ids) if whole else min(200, len(ids) // 2)
    text = tokenizer.decode(ids[:end])
    if end < len(ids):
        text += _MARK.format(len(ids) - 2 * end) + tokenizer.decode(ids[-end:])
    lines = [text, "", f"tokens: {len(ids)}", f"answer: {'unknown' if prompt.answer is None else prompt.answer}"]
    if prompt.answer is not None:
        lines.append(f"metric: {prompt.metric}")
    if prompt.references[1:]:
        lines.append(f"references: {' | '.join(prompt.references)}")
    if prompt.turn:
        lines.append(f"later turn: the last {prompt.turn} tokens")
    for start, stop in prompt.scored:
        lines.append(f"answer inside: {start} to {stop}, {tokenizer.decode(ids[start:stop]).strip()}")
    for find in prompt.finds:
        start, stop = find.span
        block = tokenizer.decode(ids[start:stop]).strip()
        lines.append(f"found at: {start} to {stop}, depth {start / len(ids):.2f}: {block}")
    return "\n".join(lines)


def parser() -> ArgumentParser:
    """The command line of headwise tasks."""
    p = ArgumentParser(prog="headwise tasks", description=__doc__)
    arguments.add_task(p, "make prompts of this task, such as passkey@depth=0.5", several=False)
    arguments.add_model(p, "whose tokenizer to use (default smollm2)", default="smollm2")
    arguments.add_length(p, "tokens of a prompt (default 1024)", default=1024)
    p.add_argument("--samples", type=int, default=1, help="how many prompts (default 1)")
    arguments.add_seed(p)
    p.add_argument("--ends", action="store_true", help="show the start and the end of a prompt only")
    p.add_argument(
        "--lm-eval", type=Path, metavar="FOLDER", help="write them for lm-evaluation-harness's --include_path"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Command line entry point."""
    options = parser().parse_args(argv)
    if options.task is None:
        if argv or (argv is None and sys.argv[1:]):
            raise HeadwiseError("say which task to show: --task TASK")
        print(listing())
        return 0
    task = parse_task(options.task)
    from profiling.models.loading import load_tokenizer

    tokenizer = load_tokenizer(options.model)
    if options.lm_eval is not None:
        return _write(task, tokenizer, options)
    prompts = make_prompts(task, tokenizer, length=options.length, samples=options.samples, seed=options.seed)
    print("\n\n".join(shown(prompt, tokenizer, whole=not options.ends) for prompt in prompts))
    return 0


def _write(task: Task, tokenizer: Any, options: Namespace) -> int:
    from profiling.harness.task_files import write_task

    how = {"length": options.length, "samples": options.samples, "seed": options.seed}
    written = write_task(options.lm_eval, task, tokenizer, **how)
    for name in written.names:
        print(f"wrote the task {name} into {options.lm_eval}")
    if written.changed:
        print(f"note: {written.changed} of {options.samples} prompts have other tokens as text", file=sys.stderr)
    if written.turned:
        told = "ask in a later turn: the harness prefills the question with its context"
        print(f"note: {written.turned} of {options.samples} prompts {told}", file=sys.stderr)
    return 0


def _described(kind: Kind) -> str:
    lines = [kind.usage, f"    asks: {kind.asks}", f"    scored: {kind.scored}", f"    from: {kind.source}"]
    lines += [f"    {parameter.name}: {parameter.says}" for parameter in kind.parameters]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
