from engine.findings.unloadable import *
