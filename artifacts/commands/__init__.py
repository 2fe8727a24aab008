"""Commands on artifacts. A module's docstring and EXAMPLES are the help page of its command."""
