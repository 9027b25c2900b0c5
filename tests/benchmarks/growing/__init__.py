"""The curves of the benchmark of growth, and their picture."""
