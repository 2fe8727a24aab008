"""Command lines on top of argparse, with options declared once."""
