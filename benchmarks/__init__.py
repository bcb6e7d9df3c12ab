"""Measurements of the template, run in the repository's root: python -m benchmarks.NAME."""

import zerotrain  # noqa: F401  before any other package: it says which ones are not installed
