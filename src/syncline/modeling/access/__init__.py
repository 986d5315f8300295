"""Which parameters a model uses, and when."""
