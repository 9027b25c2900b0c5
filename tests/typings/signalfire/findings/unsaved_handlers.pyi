from engine.findings.unsaved_handlers import *
