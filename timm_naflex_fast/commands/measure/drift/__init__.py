"""How far each mode moves a model from timm's own result.

survey (run, compare) -> report (words, table, files)
"""
