from handlers.schedules import *
