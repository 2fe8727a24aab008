"""Prompts: every task, the texts they are made of, how answers are scored, and which windows a
search has seen."""
