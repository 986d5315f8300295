"""What the verifier knows of each kind of action: how it changes a rank's abstract state, and what it must not do."""
