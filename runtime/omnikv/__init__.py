"""Decode with chosen tokens (OmniKV), and the context bank in CPU memory."""
