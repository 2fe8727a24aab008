"""Reads and writes artifacts: YAML, sidecar, content hash, locks and signatures."""
