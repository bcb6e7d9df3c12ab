"""From token caches to micro-batches: cache -> plan -> loader.

May import: runtime, config.
"""
