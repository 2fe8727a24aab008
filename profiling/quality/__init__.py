"""What attention does to a model's outputs: logits, perplexity, answers."""
