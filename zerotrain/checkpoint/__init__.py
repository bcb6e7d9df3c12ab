"""The run folder and its checkpoints: save, find, check, and load into any world size or ZeRO
stage.
May import: runtime, config, data, model, training.
"""
