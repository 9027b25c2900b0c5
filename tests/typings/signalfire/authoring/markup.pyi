from engine.authoring.markup import *
