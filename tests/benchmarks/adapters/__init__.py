"""One small file for each framework: how its documentation says that the items are trained."""
