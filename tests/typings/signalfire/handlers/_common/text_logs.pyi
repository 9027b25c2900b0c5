from handlers._common.text_logs import *
