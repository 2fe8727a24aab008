"""The artifact's fields, section by section, and plain data checked against them."""
