from engine.commands.new import *
