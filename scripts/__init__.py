"""The commands, run in the repository's root: python -m scripts.NAME. They may import everything
but benchmarks, and none imports another.
"""

import atexit
import gc

import zerotrain  # noqa: F401  before any other package: it says which ones are not installed

# Python would look for garbage in all that was imported: again and again during the imports, and
# at the end for a second.
gc.set_threshold(100_000)
atexit.register(gc.freeze)
