"""A program as text, as JSON, and beside another one."""
