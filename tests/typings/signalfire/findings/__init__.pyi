from engine.findings import *
