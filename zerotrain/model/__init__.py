"""Tokenizer and model, packing, loss, optimizer and schedule, evaluation.
May import: runtime, config, data.
"""
