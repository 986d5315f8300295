"""Pages for people, each one self-contained file."""
