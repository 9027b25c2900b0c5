from engine.resuming.saving import *
