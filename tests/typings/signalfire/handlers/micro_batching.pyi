from handlers.micro_batching import *
