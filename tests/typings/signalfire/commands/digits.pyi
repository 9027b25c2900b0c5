from engine.commands.digits import *
