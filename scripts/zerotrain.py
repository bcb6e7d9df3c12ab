"""Makes way for the package of this name, so that `python scripts/NAME.py` works in any folder.

Python then looks for modules in the script's own folder first, and finds this one.
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules[__name__]
import_module(__name__)
