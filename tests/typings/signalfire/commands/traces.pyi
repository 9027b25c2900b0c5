from engine.commands.traces import *
