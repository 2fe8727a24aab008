"""Tasks: each module here registers the ones that it makes prompts of."""
