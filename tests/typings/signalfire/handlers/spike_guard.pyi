from handlers.spike_guard import *
