from engine.handler import *
