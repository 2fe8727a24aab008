"""An artifact and one of its heads as text."""
