"""KV caches: policies made in memory, and what each KV head loses with a budget."""
