from handlers.gradient_accumulation import *
