from engine.commands.upgrade import *
