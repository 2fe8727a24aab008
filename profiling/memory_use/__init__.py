"""Memory of a prefill: predicted, and measured in processes of their own."""
