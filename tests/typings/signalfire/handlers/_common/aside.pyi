from handlers._common.aside import *
