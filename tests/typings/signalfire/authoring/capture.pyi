from engine.authoring.capture import *
