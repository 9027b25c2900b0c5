from handlers._common.kept_file import *
