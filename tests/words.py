"""Words that do not come back, with what to write: in the README, the changelog, the guide, docstrings and messages."""

WORDS = {
    r"\banew\b": "again; 'restarts'",
    r"\bone's own\b": "'your own', or name whose",
    r"\bway that was left\b": "name the way",
    r"\bthe way out\b|\bway out\b": "'the fix', or say what to write",
    r"(?:normal|recogn|initial|optim|regular|synchron|serial|summar|organ|util|general)is(?:e|ing|ation)": "American: -ize",
    r"\bcolours?\b|\bbehaviours?\b|\bfavour\w*\b|\bneighbours?\b|\bcentre[sd]?\b": "American spelling",
    r"\ban engine of its own\b": "a separate engine",
    r"\bis made again\b|\bare made again\b|\bmade again\b": "runs again, is repeated",
    r"\bthat is what\b": "name it",
    r"\bas it stands there\b": "as written",
    r"\bit is told\b|\bis told\b": "is reported",
}
"""By regular expression."""
