"""Quality: losses, answers and predictions of a model under any attention, next to dense."""
