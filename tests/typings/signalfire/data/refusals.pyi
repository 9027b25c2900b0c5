from engine.data.refusals import *
