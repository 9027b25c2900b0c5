from engine.authoring.log import *
