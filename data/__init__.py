"""Length-bucketed data pipeline: rows of text in, micro-batches of bounded size out.

1. sources.py   reads rows from files and names file and line of whatever is wrong with one
2. tokenize.py  row -> input_ids + loss mask, once per machine, into an Arrow cache that every rank
maps 3. plan.py      who trains on what, when: a pure function of (lengths, seed, epoch, global
batch, token budget, world) 4. loader.py    walks the plan for one rank and collates
"""
