"""An artifact as text."""
