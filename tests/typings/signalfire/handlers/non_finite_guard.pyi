from handlers.non_finite_guard import *
