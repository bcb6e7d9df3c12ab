"""The commands, run in the repository's root: python -m scripts.NAME. They may import everything
but benchmarks, and none imports another.
"""

import zerotrain  # noqa: F401  before any other package: it says which ones are not installed
