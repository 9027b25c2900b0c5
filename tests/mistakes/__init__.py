"""Programs with a mistake that a person plausibly makes, each with its clean twin; `test_mistakes.py` runs them."""
