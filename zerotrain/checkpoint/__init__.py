"""The run folder and its checkpoints: save, find, verify, load, convert to another world size or
ZeRO stage, export as a Hugging Face folder.
May import: runtime, config, data, model.
"""
