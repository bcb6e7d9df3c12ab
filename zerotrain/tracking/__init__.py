"""What a run reports: the start-up table, the console, metrics.jsonl, Weights & Biases.
May import: runtime, config, data, model, training, checkpoint.
"""
