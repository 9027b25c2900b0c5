from engine.resumption import *
