"""Other people's optimizers, schedulers and metrics, each beside a plain loop: ``python -m tests.neutral`` prints the tables."""
