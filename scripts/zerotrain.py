"""Let `python scripts/NAME.py` import the package zerotrain in any folder.

Python looks for modules in the script's own folder first, so it loads this file, which loads the
package.
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules[__name__]
import_module(__name__)
