from engine.commands.moved import *
