"""How far each contender moves a model from timm's own result.

command -> survey (run, compare) -> report (words, table, files) -> plots
"""
