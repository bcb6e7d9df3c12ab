"""Tools around a run: data inspection, memory estimate, export and its check, gathering, report,
checks of the data, new tokens.

They may import from every package of the template; train.py imports none of them.
"""
