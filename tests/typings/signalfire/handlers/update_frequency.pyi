from handlers.update_frequency import *
