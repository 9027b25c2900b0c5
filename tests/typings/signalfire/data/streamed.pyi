from engine.data.streamed import *
