"""Command lines: what argparse does not do, and options declared once."""
