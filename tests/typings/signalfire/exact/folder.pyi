from engine.exact.folder import *
