from engine.connection import *
