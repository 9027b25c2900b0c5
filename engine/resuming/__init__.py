"""The whole state of a run: taken, loaded, put back in place, and kept."""
