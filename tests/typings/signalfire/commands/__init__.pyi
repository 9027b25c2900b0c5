from engine.commands import *
