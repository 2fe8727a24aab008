"""Prefill with as little memory as can be: modules run by tiles of tokens. Taken off again by undo()."""
