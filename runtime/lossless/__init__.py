"""Lossless decode: chosen tokens draft, every token verifies, and what comes out is what dense attention writes."""
