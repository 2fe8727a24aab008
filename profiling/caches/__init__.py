"""KV caches: policies made in memory, and the loss of each KV head at a budget."""
