"""Memory: peaks of a prefill, in processes of their own."""
