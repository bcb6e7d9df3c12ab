"""What a run reports: the start-up table, the console, metrics.jsonl, Weights & Biases, traces.

May import: runtime, config, data, model, training, checkpoint.
"""
