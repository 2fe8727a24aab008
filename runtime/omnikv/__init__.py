"""Decode with selected tokens (OmniKV), and the context bank in CPU memory."""
