from handlers.gradient_centralization import *
