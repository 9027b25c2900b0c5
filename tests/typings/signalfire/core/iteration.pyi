from engine.core.iteration import *
