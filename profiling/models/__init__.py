"""Loads models: from the hub's cache, folders, GGUF files and packages."""
