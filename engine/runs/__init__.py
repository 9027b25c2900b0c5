"""Runs inside a run or beside it, and how a run is wired."""
