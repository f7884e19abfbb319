"""The commands of ``ds-usp`` that are not the planner's: ``env`` and ``verify``.

Nothing here prints; ``ds_usp/__main__.py`` does.
"""
