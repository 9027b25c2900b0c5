from handlers._common.trace_file import *
