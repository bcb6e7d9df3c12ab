"""The program that tokenizes rows: sources -> messages -> render -> token caches.

May import: runtime, config, data.cache, data.caches, model.hub, model.tokenizer. The trainer
imports none of it.
"""
