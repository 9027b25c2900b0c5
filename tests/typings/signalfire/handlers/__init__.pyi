from handlers import *
from handlers import __all__ as __all__
