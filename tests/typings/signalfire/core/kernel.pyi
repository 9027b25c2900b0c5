from engine.core.kernel import *
