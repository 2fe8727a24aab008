"""The model `headwise` of lm-evaluation-harness."""
