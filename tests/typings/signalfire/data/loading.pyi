from engine.data.loading import *
