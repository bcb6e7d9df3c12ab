"""The resolved run, engine, loss, optimizer, guard and evaluation of a training run.
May import: runtime, config, data, model.
"""
