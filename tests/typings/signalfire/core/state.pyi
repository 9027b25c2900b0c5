from engine.core.state import *
