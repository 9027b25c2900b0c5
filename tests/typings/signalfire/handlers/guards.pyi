from handlers.guards import *
