"""Reads what a search wrote about each head, and says why the head got its pattern; needs no model."""
