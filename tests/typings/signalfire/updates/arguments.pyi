from engine.updates.arguments import *
