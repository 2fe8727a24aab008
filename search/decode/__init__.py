"""Searches for decode: layers that filter, and tokens that each KV head keeps."""
