"""The selftest of the evaluator: a corpus of cheats, bugs and legitimate oddities, and the verdicts that they must get.

``table.py`` has the corpus, ``run.py`` judges it, ``outcome.py`` says whether a verdict is the right one.
``busy_cores.py`` keeps the machine busy meanwhile.
"""
