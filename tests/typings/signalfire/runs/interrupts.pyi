from engine.runs.interrupts import *
