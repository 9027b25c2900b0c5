from engine.data.source import *
