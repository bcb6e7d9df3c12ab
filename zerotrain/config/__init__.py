"""The config of a run: settings (schema.py), parsing and one-line errors, the merged DeepSpeed
config, batch and learning-rate arithmetic.
May import: runtime.
"""
