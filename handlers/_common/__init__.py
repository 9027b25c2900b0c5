"""Code shared by several handlers: weight averages, folders, parameter names, base classes of loggers.

Every handler may import from here; no handler imports another.
"""
