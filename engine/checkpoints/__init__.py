"""Checkpoints on disk: versions that are committed whole, verified before they are read, and pruned by their own run only.

`store` writes, reads, finds and prunes them. Nothing here knows of the loop or of handlers.
"""
