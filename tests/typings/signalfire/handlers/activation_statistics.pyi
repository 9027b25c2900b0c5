from handlers.activation_statistics import *
