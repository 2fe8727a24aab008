"""The search: finds an attention pattern for each head, and writes the artifact."""
