from handlers.validation import *
