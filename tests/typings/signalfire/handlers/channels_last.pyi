from handlers.channels_last import *
