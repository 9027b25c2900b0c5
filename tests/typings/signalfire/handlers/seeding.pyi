from handlers.seeding import *
