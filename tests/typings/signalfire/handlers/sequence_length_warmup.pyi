from handlers.sequence_length_warmup import *
