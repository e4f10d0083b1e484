"""The evaluator judged by what it must not be fooled by: a corpus of cheats, bugs and legitimate oddities, and the verdicts they must get.

``table.py`` has the corpus, ``run.py`` judges it, ``outcome.py`` says whether a verdict is the right one.
"""
