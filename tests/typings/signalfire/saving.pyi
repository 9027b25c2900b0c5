from engine.saving import *
