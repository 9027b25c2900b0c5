from engine.data.seeded import *
