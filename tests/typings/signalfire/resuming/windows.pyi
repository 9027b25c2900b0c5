from engine.resuming.windows import *
