from engine.authoring.versions import *
