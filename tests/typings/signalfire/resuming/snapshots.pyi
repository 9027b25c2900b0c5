from engine.resuming.snapshots import *
