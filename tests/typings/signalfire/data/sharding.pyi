from engine.data.sharding import *
