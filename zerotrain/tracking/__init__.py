"""What a run reports: the start-up table, the console, metrics.jsonl, Weights & Biases,
TensorBoard.
May import: runtime, config, data, model, checkpoint.
"""
