from engine.exact.huggingface import *
