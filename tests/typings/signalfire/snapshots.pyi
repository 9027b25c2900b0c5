from engine.snapshots import *
