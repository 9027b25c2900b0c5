from engine.data.same import *
