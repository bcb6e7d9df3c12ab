"""Tools around a run: data inspection, plan, rehearsal, report, proofs, and export with its check.

They may import from every package below them. train.py imports no tool.
"""
