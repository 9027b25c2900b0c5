from handlers.histograms import *
