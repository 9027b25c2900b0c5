from handlers.rewindable import *
