from engine.interrupts import *
