from handlers._common.line_file import *
