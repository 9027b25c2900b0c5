from engine.resuming.state_parts import *
