from engine.frozen import *
