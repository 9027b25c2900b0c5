"""What several handlers share and is no handler itself: weight averages, folders, parameter names, loggers' base classes.

Every handler may import from here; no handler imports another.
"""
