"""Headwise in lm-evaluation-harness: its model, and our tasks as files that the harness reads."""
