"""Language models that write candidates: prompts, single-shot generation, agents, metrics.

Nothing here is imported until a verb needs it. Prompts and metrics need no further package; generation and agents need the extra
``models``, see :func:`peerlane.generate.extra.require_models_extra`.
"""
