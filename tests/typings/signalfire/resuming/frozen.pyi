from engine.resuming.frozen import *
