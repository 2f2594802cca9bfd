"""Documentation, and what draws parts of it from the code."""
