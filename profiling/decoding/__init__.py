"""Decode: time a token, losses of forced tokens and answers, by methods and caches."""
