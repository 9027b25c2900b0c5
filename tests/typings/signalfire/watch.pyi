from engine.watch import *
