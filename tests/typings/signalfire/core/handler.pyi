from engine.core.handler import *
