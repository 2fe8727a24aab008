"""Takes an artifact over to a fine-tune: measures drift, and searches again the heads that moved."""
