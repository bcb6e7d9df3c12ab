"""Tools around a run: data inspection, plan and rehearsal of a run, export and its check,
gathering, report, checks of the data, new tokens.

They may import from every package of the template; train.py imports none of them.
"""
