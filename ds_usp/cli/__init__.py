"""The commands of ``ds-usp`` that are not the planner's: ``env``, ``verify`` and
``report-communication``.

Nothing here prints; ``ds_usp/__main__.py`` does.
"""
