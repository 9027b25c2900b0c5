from handlers.gradient_noise import *
