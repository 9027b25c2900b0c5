from engine.core.connection import *
