"""Options of commands as pydantic models, and the parser made from them."""
