from handlers._common.event_files import *
