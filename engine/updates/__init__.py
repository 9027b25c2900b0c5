"""What users write of an update: its spec, and its optimizers."""
