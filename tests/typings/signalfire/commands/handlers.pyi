from engine.commands.handlers import *
