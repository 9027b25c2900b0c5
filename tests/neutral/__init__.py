"""Other people's optimizers, schedulers, metrics, checks and programs, beside ours.

``python -m tests.neutral`` prints the tables.
"""
