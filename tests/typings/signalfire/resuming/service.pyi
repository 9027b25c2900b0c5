from engine.resuming.service import *
