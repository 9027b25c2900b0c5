from engine.data.combined import *
