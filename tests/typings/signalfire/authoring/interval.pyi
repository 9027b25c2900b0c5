from engine.authoring.interval import *
