"""The answers that a forced choice compares."""

from __future__ import annotations

from profiling.prompts.prompt import Prompt

# Choices that are compared of those that a prompt has, the right one among them.
CHOICES = 8


def compared(prompt: Prompt) -> tuple[str, ...]:
    """The answers that a forced choice compares, in the prompt's order: the right one and CHOICES - 1 at most.

    None where the right one is not among its choices.
    """
    if prompt.answer not in prompt.choices:
        return ()
    wrong = [choice for choice in prompt.choices if choice != prompt.answer][: CHOICES - 1]
    return tuple(choice for choice in prompt.choices if choice == prompt.answer or choice in wrong)
