"""From rows to tokens: sources -> messages -> render.

May import: runtime, config.
"""
