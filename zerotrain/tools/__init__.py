"""Tools around a run: export and its proof, conversion, memory plan, report, data proofs.

They may import from every package of the template; train.py imports none of them.
"""
