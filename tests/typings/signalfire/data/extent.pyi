from engine.data.extent import *
