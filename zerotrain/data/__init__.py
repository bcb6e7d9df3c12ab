"""From rows to micro-batches: sources -> messages -> render -> tokenize -> plan -> loader.

May import: runtime, config.
"""
