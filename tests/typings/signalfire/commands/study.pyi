from engine.commands.study import *
