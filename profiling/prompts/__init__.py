"""Prompts: tasks, their texts, metrics of answers, and windows that a search has seen."""
