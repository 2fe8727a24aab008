"""Caches of transformers that Headwise makes: such as grow in place, and such as drop tokens by a
policy."""
