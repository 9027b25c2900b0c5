from engine.core.settings import *
