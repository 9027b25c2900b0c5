"""The modules of an engine: their names, what is looked at before a run, and their random streams."""
