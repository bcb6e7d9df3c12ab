"""The run folder and its checkpoints: save, find, check, and load into any world size or ZeRO
stage. zero_state.py alone knows DeepSpeed's private names.
May import: runtime, config, data, model, training.
"""
