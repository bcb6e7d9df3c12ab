"""A model's files, architecture and weights; what is trained of it; packing and tensor parallelism.
May import: runtime, config, data.
"""
