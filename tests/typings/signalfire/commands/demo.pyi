from engine.commands.demo import *
