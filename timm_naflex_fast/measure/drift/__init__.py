"""How far each contender moves a model from timm's own result.

command -> inputs (images) -> survey (run, compare) -> report (words, tables, files) -> plots
"""
