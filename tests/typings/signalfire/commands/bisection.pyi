from engine.commands.bisection import *
