from handlers.truncated_bptt import *
