"""Commands on artifacts, one module each: its docstring and EXAMPLES are the help page."""
