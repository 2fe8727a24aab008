"""Similarity of layers: whose top tokens the layers after them attend to."""
