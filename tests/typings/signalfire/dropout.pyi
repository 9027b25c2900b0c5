from engine.dropout import *
