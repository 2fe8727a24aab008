"""Prompts: tasks, their texts, scoring of answers, and the windows that a search has seen."""
