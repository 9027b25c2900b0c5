from engine.group import *
